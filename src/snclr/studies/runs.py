"""The runs of a study: rows (a label and its settings) × seeds, each identified by a key."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from snclr.errors import UserError, did_you_mean, known_spelling
from snclr.io.hashing import sha256_file, sha256_json
from snclr.methods.config import METHODS
from snclr.runtime.settings import RENAMED_SETTINGS, current_name
from snclr.train.config import MAY_CHANGE_ON_RESUME, REMOVED_SETTINGS, all_settings, resolve, settings_for_method

SHARED = frozenset(
    {
        *("data", "recipe", "encoder", "image_size", "stem", "heads", "sincos", "freeze_patch_embed"),
        *("batch_size", "epochs", "views", "crop_min", "precision", "init_from"),
    }
)
"""Settings that are the same for all rows; a flag sets them."""
ENVIRONMENT = MAY_CHANGE_ON_RESUME - {"init_from"}
"""Settings without effect on the weights, which are not part of a run's key. A fingerprint replaces `data`."""
ASSIGNED = {
    "method": "use --methods",
    "seed": "use --seeds",
    "resume": "the same command continues the study",
    "overwrite": "finished runs are recognized by their settings",
}
"""Settings that the study assigns to each run, and what to do instead of setting them."""
UNTRAINED = "random"
"""Name of the row whose encoder keeps its random initial weights."""
MEASURES = ("knn", "linear")
"""What a run is evaluated by unless a study says otherwise."""


@dataclass(frozen=True)
class Row:
    """A row of the table: its label, and the settings in which it differs from other rows."""

    label: str
    settings: dict[str, Any]
    untrained: bool = False
    """Whether the encoder keeps its random initial weights."""
    paper: dict[str, float] = field(default_factory=dict)
    """The results of a paper for this row, by metric, as in the table of results."""


@dataclass(frozen=True)
class Evaluation:
    """How a run is evaluated; `kind` is test, validation (a part of the training set) or cost (seconds, memory)."""

    kind: str = "test"
    data: str | None = None
    test: str | None = None
    k: int | Literal["auto"] = 200
    temperature: float = 0.07
    steps: int = 0
    fingerprint: str = ""
    """Digest of the labeled images."""
    measures: tuple[str, ...] = MEASURES
    """knn, linear, linear-paper, finetune-1, finetune-10 (percent of the labels), detect."""
    untrained: bool = False
    """Evaluate the random initial weights."""
    coco: str | None = None
    """Folder of the detection data."""
    detect_recipe: str = "1x"


_NOT_IN_KEY = ("data", "test", "coco")
"""Paths; the fingerprint identifies the images."""
_LATER = ("measures", "untrained", "detect_recipe")
"""Fields that earlier versions did not have; they are part of a key only if they differ from the default."""


@dataclass(frozen=True)
class Run:
    """One run: the settings given to its process, the settings that identify it, and its evaluation."""

    label: str
    seed: int
    given: dict[str, Any]
    settings: dict[str, Any]
    data: str
    """Digest of the training images."""
    evaluation: Evaluation

    @property
    def training_key(self) -> str:
        """Digest of everything that determines the weights."""
        untrained = [UNTRAINED] if self.evaluation.untrained else []
        return sha256_json([_non_default(self.settings), self.data, *untrained])

    @property
    def key(self) -> str:
        """Digest of everything that determines the record: training and evaluation."""
        evaluation = {
            name: value
            for name, value in dataclasses.asdict(self.evaluation).items()
            if name not in _NOT_IN_KEY and not (name in _LATER and value == getattr(Evaluation, name))
        }
        if self.evaluation.kind == "cost" and self.given.get("compile"):
            evaluation["compile"] = True  # same weights, different timings
        return sha256_json([_non_default(self.settings), self.data, evaluation])

    def is_recorded_by(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has this run's key and no setting with another value."""
        if record.get("key") != self.key:
            return False
        recorded = {current_name(n): v for n, v in record["settings"].items() if REMOVED_SETTINGS.get(n) != v}
        return {**self.settings, **recorded} == self.settings

    @property
    def folder(self) -> str:
        """Name of the run directory."""
        return f"{self._name}-seed{self.seed}-{self.training_key[:12]}"

    @property
    def record_name(self) -> str:
        """File name of the record."""
        return f"{self._name}-seed{self.seed}-{self.key[:12]}.json"

    @property
    def _name(self) -> str:
        return UNTRAINED if self.evaluation.untrained else str(self.settings["method"])

    @property
    def title(self) -> str:
        """Label and seed, for messages."""
        return f"{self.label}, seed {self.seed}"


def given_settings(row: Row, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a row: its own, and the common ones that its method uses."""
    return {**settings_for_method(row.settings["method"], common), **row.settings}


def make_run(
    row: Row, seed: int, common: Mapping[str, Any], *, data: str, evaluation: Evaluation, **overrides: Any
) -> Run:
    """Resolve the settings of one row and seed."""
    evaluation = dataclasses.replace(evaluation, untrained=row.untrained)
    given = {**given_settings(row, common), **overrides, "seed": seed}
    settings = {name: value for name, value in resolve(given).to_dict().items() if name not in ENVIRONMENT}
    if settings.get("init_from"):
        settings["init_from"] = _weights_digest(str(settings["init_from"]))
    return Run(row.label, seed, given, settings, data, evaluation)


def parse_methods(text: str | Sequence[str]) -> list[Row]:
    """Parse rows: `snclr,nnclr` or, with settings, `snclr:neighbors=10,gamma=max,nnclr`.

    >>> [row.settings for row in parse_methods("snclr:neighbors=10,gamma=max,nnclr")]
    [{'method': 'snclr', 'neighbors': 10, 'gamma': 'max'}, {'method': 'nnclr'}]
    """
    text = "".join((text if isinstance(text, str) else ",".join(text)).split())
    specs = [spec for spec in re.split(r",(?=[^=,]*(?:[:,]|$))", text) if spec]  # at commas before a method
    if not specs:
        raise UserError("--methods is empty. Give a list, e.g. snclr,nnclr,mocov3; `snclr methods` lists all methods")
    if len(set(specs)) < len(specs):
        raise UserError(f"--methods {text} contains a row twice; give each row once")
    return [_parse_row(spec) for spec in specs]


def _parse_row(spec: str) -> Row:
    if spec == UNTRAINED:
        return Row(UNTRAINED, {"method": "snclr"}, untrained=True)
    method, _, rest = spec.partition(":")
    if not rest and "=" not in method and known_spelling(method, METHODS) not in METHODS:
        hint = did_you_mean(method, METHODS)
        raise UserError(f"--methods: there is no method {method!r}{hint}; `snclr methods` lists all")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    if "=" in method or not all(sign for _, sign, _ in pairs):
        raise UserError(f"--methods: {spec!r} is not a method with settings. Write METHOD:NAME=VALUE,NAME=VALUE")
    settings = {row_setting(name, "--methods"): value for name, _, value in pairs}
    return Row(spec, {name: parse_value(name, value) for name, value in {"method": method, **settings}.items()})


def row_setting(name: str, flag: str) -> str:
    """Return the name of a setting with underscores; raise UserError if it must be the same for all rows."""
    name = current_name(name.strip().replace("-", "_"))
    if name in SHARED | ENVIRONMENT | ASSIGNED.keys():
        raise UserError(f"{flag}: {name} must be the same for all rows. Set it with --{name.replace('_', '-')}")
    return name


def parse_value(name: str, text: str) -> Any:
    """Convert text to the type of a setting.

    >>> parse_value("neighbors", "10"), parse_value("gamma", "max"), parse_value("final_bn", "true")
    (10, 'max', True)
    """
    if name not in all_settings():
        resolve({name: text})  # raises with a spelling hint
    return all_settings()[name].parse(text)


def _non_default(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop settings at their default and use each setting's first name, so that keys are the same in all versions."""
    first_names = {present: earlier for earlier, present in RENAMED_SETTINGS.items()}
    return {first_names.get(n, n): value for n, value in settings.items() if value != all_settings()[n].default}


def _weights_digest(path: str) -> str:
    """Return the digest of the initial weights, which identifies them independently of their path."""
    from snclr.checkpoint.external_weights import PRETRAINED
    from snclr.checkpoint.run_dir import RunDir

    if path == PRETRAINED:
        return path
    file = RunDir(path).encoder_weights if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"--init-from {path}: there is no such weights file or complete run")
    return f"sha256:{sha256_file(file)[:16]}"
