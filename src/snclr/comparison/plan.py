"""What a comparison consists of: entries (a label and settings) × seeds, as a list of runs with a key each."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snclr.config import MAY_CHANGE_ON_RESUME, PretrainConfig, field_types, resolve, settings_of
from snclr.errors import UserError
from snclr.methods import METHODS

EQUAL = frozenset(
    {
        *("data", "recipe", "encoder", "image_size", "stem", "heads", "sincos", "freeze_patch_embed"),
        *("batch_size", "epochs", "views", "crop_min", "precision", "init_from", "accumulate"),
    }
)
"""What all rows share, so that they are compared and not confused. A flag sets it for all."""

OUTSIDE = MAY_CHANGE_ON_RESUME - {"init_from"}
"""Where and how a run is computed, not what: no part of its key. The data's fingerprint stands for `data`."""

OWN = frozenset({"method", "seed", "out", "resume", "overwrite"})
"""Settings that the comparison itself gives to each run."""

TUNE_SEED = 1_000_000
"""The seed of the runs that choose a setting: none of those that are compared."""


@dataclass(frozen=True)
class Entry:
    """A row of the table: its label, and the settings in which it differs from the others."""

    label: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """How a run is measured; `kind` is test, validation (a part of the training set) or cost (seconds, memory)."""

    kind: str = "test"
    data: str | None = None
    test: str | None = None
    k: int = 200
    temperature: float = 0.07
    steps: int = 0
    fingerprint: str = ""
    """Digest of the labelled images."""


_PARTS = ("train", "training", "val", "validation", "test")


def data_name(data: str) -> str:
    """What to call the images in a table: the end of their path, and no more of it than tells something.

    >>> data_name("/home/me/flowers/"), data_name("/home/me/flowers/train"), data_name("demo")
    ('flowers', 'flowers/train', 'demo')
    """
    path = Path(data)
    return f"{path.parent.name}/{path.name}".lstrip("/") if path.name in _PARTS else path.name


@dataclass(frozen=True)
class Run:
    """One run: what the process is given, the settings that identify it, and how it is measured."""

    label: str
    seed: int
    given: dict[str, Any]
    settings: dict[str, Any]
    data: str
    """Digest of the training images."""
    evaluation: Evaluation

    @property
    def training_key(self) -> str:
        """Digest of all that decides the weights."""
        return _digest([_chosen(self.settings), self.data])

    @property
    def key(self) -> str:
        """Digest of all that decides the record: the training and how it is measured."""
        measured = {n: v for n, v in dataclasses.asdict(self.evaluation).items() if n not in ("data", "test")}
        if self.evaluation.kind == "cost" and self.given.get("compile"):
            measured["compile"] = True  # no other weights, but other seconds
        return _digest([_chosen(self.settings), self.data, measured])

    def is_recorded_by(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of this very run: same key, and no setting that it knows differs from ours."""
        known = record.get("settings")
        return record.get("key") == self.key and isinstance(known, dict) and {**self.settings, **known} == self.settings

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{self.settings['method']}-seed{self.seed}-{self.training_key[:12]}"

    @property
    def record(self) -> str:
        """The name of its record."""
        return f"{self.settings['method']}-seed{self.seed}-{self.key[:12]}.json"

    @property
    def title(self) -> str:
        """What a person is shown."""
        return f"{self.label}, seed {self.seed}"


def parse_methods(text: str | Sequence[str]) -> list[Entry]:
    """Rows from `snclr,nnclr` or, with settings of their own, `snclr:neighbors=10,gamma=max,nnclr`.

    A part with `=` but no method before it belongs to the method on its left.

    >>> [entry.settings for entry in parse_methods("snclr:neighbors=10,gamma=max,nnclr")]
    [{'method': 'snclr', 'neighbors': 10, 'gamma': 'max'}, {'method': 'nnclr'}]
    """
    parts = text.split(",") if isinstance(text, str) else [part for item in text for part in item.split(",")]
    specs: list[str] = []
    for part in (part.strip() for part in parts):
        if "=" in part.partition(":")[0]:
            if not specs or ":" not in specs[-1]:
                raise UserError(
                    f"{part!r} in --methods belongs to no method: write METHOD:{part}, e.g. snclr:neighbors=10"
                )
            specs[-1] += f",{part}"
        elif part:
            specs.append(part)
    if not specs:
        raise UserError("--methods names none: give some, e.g. --methods snclr,nnclr,mocov3 (`snclr methods`)")
    if twice := [spec for i, spec in enumerate(specs) if spec in specs[:i]]:
        raise UserError(f"--methods has {twice[0]!r} twice: give each row once")
    return [_parse_entry(spec) for spec in specs]


def _parse_entry(spec: str) -> Entry:
    method, _, rest = spec.partition(":")
    settings: dict[str, Any] = {"method": method}
    for part in filter(None, rest.split(",")):
        name, sign, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not sign:
            raise UserError(f"{part!r} in {spec!r} is no setting: write NAME=VALUE, e.g. {method}:neighbors=10")
        if name in OWN or name in EQUAL | OUTSIDE - {"preset"}:
            raise UserError(
                f"{name} cannot be a row's own ({spec!r}): encoder, data, views, steps and seeds are equal for all"
                f" rows. Give --{name.replace('_', '-')} to set it for all, where that is a flag."
            )
        settings[name] = parse_value(name, value.strip())
    return Entry(spec, settings)


def parse_value(name: str, text: str) -> Any:
    """A setting's value from text, as the type its field has.

    >>> parse_value("neighbors", "10"), parse_value("gamma", "max"), parse_value("final_bn", "true")
    (10, 'max', True)
    """
    fields = {f.name: f for f in dataclasses.fields(PretrainConfig)}
    if name not in fields:
        resolve({name: text})  # raises, with the nearest name
    for kind in field_types(fields[name]):
        try:
            if kind is bool:
                return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
            if kind is not type(None):
                return kind(text)
        except (ValueError, KeyError):
            continue
    kinds = " or ".join(kind.__name__ for kind in field_types(fields[name]) if kind is not type(None))
    raise UserError(f"{name} must be {kinds.replace('bool', 'true or false')}, not {text!r}")


def parse_seeds(seeds: int | str | Sequence[int]) -> list[int]:
    """`3` is the seeds 0, 1, 2; `0,4,7` is a list, and `4,` the seed 4 alone.

    >>> parse_seeds("3"), parse_seeds("4,"), parse_seeds([1, 2])
    ([0, 1, 2], [4], [1, 2])
    """
    try:
        if isinstance(seeds, str):
            given = [int(part) for part in seeds.split(",") if part.strip()]
            found = given if "," in seeds else list(range(given[0]))
        else:
            found = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    except (ValueError, IndexError):
        raise UserError(f"--seeds takes a number of seeds (3) or a list (0,4,7), not {seeds!r}") from None
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise UserError(f"--seeds needs at least one seed, none below 0 and none twice; {seeds!r} was given")
    return found


def parse_tune(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The grid of `--tune lr=0.002,0.004`, as overrides; several settings give every combination.

    >>> parse_tune(["lr=0.1,0.2"])
    [{'lr': 0.1}, {'lr': 0.2}]
    """
    axes: list[list[tuple[str, Any]]] = []
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        parts = [value.strip() for value in values.split(",") if value.strip()]
        if not sign or len(set(parts)) < 2:
            raise UserError(f"--tune takes a setting and at least two values, e.g. lr=0.002,0.004, not {text!r}")
        if name in EQUAL | OUTSIDE | OWN:
            raise UserError(f"--tune {name}: this is equal for all rows and cannot be tuned")
        axes.append([(name, parse_value(name, part)) for part in parts])
    return [dict(choice) for choice in itertools.product(*axes)] if axes else []


def make_run(
    entry: Entry, seed: int, common: Mapping[str, Any], *, data: str, evaluation: Evaluation, **more: Any
) -> Run:
    """The run of one entry and seed; `more` are further overrides (a tuned value).

    A common setting that means nothing to the entry's method is left out for it.
    """
    method = str(entry.settings["method"])
    shared = settings_of(method, common) if method in METHODS else dict(common)  # resolve names the methods there are
    given = {**shared, **entry.settings, **more, "seed": seed}
    resolved = resolve(given).to_dict()
    settings = {name: value for name, value in resolved.items() if name not in OUTSIDE}
    if settings.get("init_from"):
        settings["init_from"] = _weights_digest(str(settings["init_from"]))
    return Run(entry.label, seed, given, settings, data, evaluation)


def check_name(name: str) -> None:
    """Refuse a study's name that its files cannot have, before anything is run."""
    if not name.isprintable() or name[:1] in ("", ".") or set(name) & set("/\\") or len(name.encode()) > 150:
        raise UserError(
            f"--name {name!r}: the table's files are called by it, and no file can be called that. Give letters, "
            f"digits, spaces and dashes, e.g. --name {slug(name)[:60]}"
        )


def slug(text: str) -> str:
    """A file name of it.

    >>> slug("queue lengths (CIFAR-10)")
    'queue-lengths-cifar-10'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "study"


def _chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not at their default: a setting that a later version adds does not change the key."""
    defaults = {f.name: f.default for f in dataclasses.fields(PretrainConfig)}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def _weights_digest(path: str) -> str:
    """What stands for weights to start from: their content, wherever the file lies."""
    from snclr.train.run_folder import RunFolder

    file = RunFolder(path).encoder_weights if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"--init-from {path}: there is no such weights file or complete run")
    with file.open("rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
