"""`snclr demo`: the whole way on images that come with the package, in a few minutes on a laptop."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from snclr.encoders import EncoderSpec
    from snclr.evaluate.features import Features

EXAMPLES = """examples:
  snclr demo
  snclr demo --seed 1 --out runs/demo-1
"""


def demo(
    *,
    out: str | Path = "demo-run",
    seed: int = 0,
    epochs: int | None = None,
    overwrite: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Pretrain, kNN, linear, neighbour figure and report; the evaluations beside the untrained encoder and raw pixels.

    An earlier demo in `out` is replaced, which needs `overwrite`; any other folder is refused and left alone.
    """
    from snclr.commands.neighbors import neighbors
    from snclr.commands.report import report
    from snclr.config import resolve
    from snclr.data.sources import open_source
    from snclr.export.encoder import load_encoder
    from snclr.train.build import build_method, encoder_spec
    from snclr.train.pretrain import pretrain

    began = time.monotonic()
    settings: dict[str, Any] = {"recipe": "demo", "data": "demo", "seed": seed}
    if epochs is not None:
        settings["epochs"] = epochs
    replace = overwrite and _holds_demo(Path(out))
    result = pretrain(**settings, out=str(out), overwrite=replace, quiet=quiet)
    if not result.complete:
        return {"exit_code": result.exit_code, "out": str(out)}
    trained, spec = load_encoder(Path(out))
    config = resolve(settings)
    untrained = build_method(config, encoder_spec(config)).encoder  # the very weights the training started from
    train, test = open_source("demo", split="train"), open_source("demo", split="test")
    table = {
        "trained (SNCLR)": _score(_features(trained, spec, train), _features(trained, spec, test), out),
        "untrained": _score(_features(untrained, spec, train), _features(untrained, spec, test)),
        "raw pixels": _score(_pixels(train, spec.image_size), _pixels(test, spec.image_size)),
    }
    figure = neighbors(out, rows=6, k=5, seed=seed, quiet=True)
    page = report(out, rows=6, k=5, seed=seed, quiet=True) if figure.get("complete", True) else figure
    if not page.get("complete", True):  # a person or a scheduler asked to stop
        return {"exit_code": page["exit_code"], "out": str(out)}
    return {
        "exit_code": 0,
        "out": str(out),
        "seconds": time.monotonic() - began,
        "images": [len(train), len(test)],
        "classes": train.classes,
        "table": table,
        "figure": figure["figure"],
        "report": page["report"],
        "same_class_by_rank": figure["same_class_by_rank"],
    }


def _holds_demo(out: Path) -> bool:
    """Whether an earlier demo is there; UserError for any other run, whose hours must not be lost to a mistyped --out.

    A folder without a run's settings is left to the training, which takes an empty one and refuses any other.
    """
    from snclr.errors import UserError
    from snclr.train.run_folder import RunFolder
    from snclr.train.saved_run import read_config

    run = RunFolder(out)
    if not (run.looks_like_run() and run.config.is_file()):
        return False
    saved = read_config(run.config)
    if saved.get("recipe") == saved.get("data") == "demo":
        return True
    raise UserError(
        f"{out} holds a run that is no demo (recipe {saved.get('recipe')}, data {saved.get('data')}): nothing was "
        "touched. Choose another --out folder."
    )


def _features(encoder: nn.Module, spec: EncoderSpec, source: Any) -> Features:
    from snclr.evaluate.features import extract_features

    return extract_features(encoder.eval(), source, image_size=spec.image_size, quiet=True)


def _pixels(source: Any, image_size: int) -> Features:
    from snclr.evaluate.features import pixel_features

    return pixel_features(source, image_size)


def _score(train: Features, test: Features, out: str | Path | None = None) -> dict[str, Any]:
    """kNN and linear accuracy, with their protocols; kept in the run's results where `out` is given."""
    from snclr.evaluate.knn import knn
    from snclr.evaluate.linear import linear_cached
    from snclr.evaluate.results import append_result

    labelled = (train.features, train.labels, test.features, test.labels)
    by_votes, by_line = knn(*labelled, k=20, data="demo"), linear_cached(*labelled, data="demo")
    if out is not None:
        append_result(out, "knn", {"top1": by_votes.top1, "top5": by_votes.top5}, by_votes.protocol)
        append_result(out, "linear-cached", {"top1": by_line.top1, "top5": by_line.top5}, by_line.protocol)
    return {
        "knn": by_votes.top1,
        "linear": by_line.top1,
        "knn_protocol": by_votes.protocol,
        "linear_protocol": by_line.protocol,
    }


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--out", default="demo-run", help="the run folder; an earlier demo there is replaced")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="all randomness follows from it")
    parser.add_argument("--epochs", type=int, metavar="N", help="train for fewer or more epochs than the recipe")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    if not a.json:
        print(
            "Pre-training on 6,000 small photographs, without their labels. This takes a few minutes.", file=sys.stderr
        )
    found = demo(out=a.out, seed=a.seed, epochs=a.epochs, quiet=a.json)
    if a.json:
        print(json.dumps(found))
    elif found["exit_code"] == 0:
        _print(found)
    return int(found["exit_code"])


def _print(found: dict[str, Any]) -> None:
    """The closing table, and where things are."""
    from snclr.export.encoder import load_encoder, loading_snippet

    rows = found["table"]
    print(f"\n{'features':18}{'kNN':>8}{'linear':>9}   (top-1 on {found['images'][1]:,} test images)")
    for name, row in rows.items():
        print(f"{name:18}{row['knn']:>8.1%}{row['linear']:>9.1%}")
    any_row = rows["trained (SNCLR)"]
    shares = ", ".join(f"{share:.0%}" for share in found["same_class_by_rank"])
    print(f"\nneighbours of the same class, by rank: {shares}")
    print(f"\nProtocols (labels are used only here)\n  {any_row['knn_protocol']}\n  {any_row['linear_protocol']}")
    out = found["out"]
    print(f"\n{found['seconds'] / 60:.1f} minutes. Figure: {found['figure']}   weights: {out}/encoder.safetensors")
    print(f"Everything on one page, for a browser: {found['report']}")
    print(f"\nLoad the encoder without snclr:\n\n{loading_snippet(load_encoder(Path(out))[1], Path(out))}")
    print("Now your own images:  snclr pretrain --data my-photos/ --out runs/photos")
