"""`snclr pretrain`: every setting of `PretrainConfig` is a flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection
from typing import Any

from snclr.config import PretrainConfig, field_types
from snclr.recipes import get_recipe

EXAMPLES = """examples:
  snclr pretrain --data my-photos/ --out runs/photos
  snclr pretrain --recipe cifar --data cifar10 --out runs/cifar --epochs 100
  snclr pretrain --recipe vit-small-imagenet --data imagenet/train --out runs/vit-s
  snclr pretrain --method byol --data my-photos/ --out runs/byol
  snclr pretrain --resume --out runs/photos

A recipe sets the defaults (`snclr recipes` lists them) and a flag wins over the recipe. The defaults shown are those of
the recipe photos, which is used where none is named.
"""

GROUPS: dict[str, str] = {
    "data": "data and run",
    "encoder": "encoder and heads",
    "batch_size": "optimisation",
    "temperature": "the method",
    "views": "views",
    "seed": "where it runs",
    "resume": "the run folder",
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """A flag for each setting, in the settings' groups."""
    parser.epilog = EXAMPLES
    parser.usage = "snclr pretrain --data DATA --out RUN [--recipe NAME] [options]"
    add_settings(parser)
    parser.add_argument("--json", action="store_true", default=False, help="print the result as one JSON object")
    parser.set_defaults(handler=run)


def add_settings(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """The settings of a run as flags; another command may leave out what means nothing to it."""
    defaults = get_recipe("photos").settings
    group = parser.add_argument_group("data and run")
    for f in dataclasses.fields(PretrainConfig):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name]) if f.name != "data" else group
        if f.name not in leave_out:
            _add_flag(group, f, defaults.get(f.name, f.default))


def _add_flag(group: Any, f: dataclasses.Field[Any], default: Any) -> None:
    kinds = [kind for kind in field_types(f) if kind is not type(None)]
    flag = "--" + f.name.replace("_", "-")
    text = f.metadata["help"].replace("%", "%%")
    # No default here: what a person did not give must not win over the recipe. It is only shown.
    nothing = default is None or default is False or default == ""
    shown = "" if nothing or "(default" in text else f" (default: {default})"
    options: dict[str, Any] = {"help": text + shown, "default": argparse.SUPPRESS}
    if kinds == [bool]:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    else:
        options["metavar"] = _metavar(f, kinds)
        group.add_argument(flag, type=_number_or_text if len(kinds) > 1 else kinds[0], **options)


def _metavar(f: dataclasses.Field[Any], kinds: list[type]) -> str:
    if f.metadata["choices"]:
        return "{" + ",".join(f.metadata["choices"]) + "}"
    return {int: "N", float: "X", str: "TEXT"}[kinds[0]] if len(kinds) == 1 else "X|max"


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that a person gave, and no others: what was not given must not win over the recipe."""
    names = {f.name for f in dataclasses.fields(PretrainConfig)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def run(arguments: argparse.Namespace) -> int:
    """Train, then say where things are."""
    from snclr.distributed import rank_and_size
    from snclr.train.pretrain import pretrain

    result = pretrain(**given_settings(arguments))
    if rank_and_size()[0] != 0:  # process 0 speaks for all
        return result.exit_code
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(result), "out": str(result.out), "complete": result.complete}))
    elif result.complete:
        print(_closing(result))
    return result.exit_code


def _closing(result: Any) -> str:
    from snclr.export.encoder import load_encoder, loading_snippet

    spec = load_encoder(result.out)[1]
    skipped = f"\n{result.skipped} images could not be read; see {result.out}/skipped.jsonl" if result.skipped else ""
    return (
        f"trained {result.step} steps; the encoder is {result.out}/encoder.safetensors{skipped}\n\n"
        f"Load it without snclr:\n\n{loading_snippet(spec, result.out)}\n\n"
        f"Next: snclr neighbors {result.out}   and, with labelled images, snclr knn {result.out} --data LABELLED"
    )
