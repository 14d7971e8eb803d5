"""Named studies of `snclr compare`: the paper's tables and a table of all methods; and the tables of `snclr ablate`.

The rows of an ablation table are scaled to the dataset by fixed rules.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

from snclr.data.info import DatasetInfo
from snclr.errors import UserError, did_you_mean
from snclr.recipes import get_recipe
from snclr.studies.runs import MEASURES, UNTRAINED, Row, given_settings
from snclr.train.config import PretrainConfig, fit_queue, resolve

PAPER_NEIGHBORS = (10, 30, 50)
PAPER_ENTRIES_PER_CLASS = 128
"""Mean number of queue entries of an image's class in the paper: 128,000 features of 1,000 classes."""
HALVINGS = 4
"""The paper's queue lengths are 128,000 and four halvings of it, down to 8,000."""
TABLES: dict[str, str] = {
    "positiveness": "no neighbors, hard neighbors (all fully positive), soft neighbors (Eq. 4)",
    "neighbors": "number of neighbors K",
    "queue": "queue length Q",
    "sides": "neighbors among the positives, the negatives, both, neither",
    "cost": "seconds per step and memory over the queue length",
}
_OWN_K_AND_Q = "K and Q of the run (--neighbors, --queue-length or the recipe)"
RULES: dict[str, str] = {
    "positiveness": _OWN_K_AND_Q,
    "neighbors": "K = 10, 30, 50 as in the paper, scaled down (to at least 1) if the queue holds fewer than the paper's"
    " 128 entries of an image's class on average",
    "queue": "the run's Q (at most the number of images) and four halvings (the paper: 128,000 to 8,000), at least K",
    "sides": _OWN_K_AND_Q,
    "cost": "the lengths of the queue table, with full queues; the first row has no neighbors and a queue of length 1",
}
NO_NEIGHBORS = Row("no neighbors", {"method": "snclr", "sides": "neither"})


@dataclass(frozen=True)
class System:
    """A row of a table: its label in the paper, the method that makes it here, and its results in percent."""

    label: str
    method: str
    reported: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By number of epochs and metric."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this row for any data."""
    paper_only: Mapping[str, Any] = field(default_factory=dict)
    """Further settings with recipes at the paper's scale."""
    epochs: int | None = None
    """Epochs of this row, if the rows of its table differ in them."""


@dataclass(frozen=True)
class NamedStudy:
    """Rows and defaults of a study, e.g. of a table of the paper. Flags override the defaults."""

    title: str
    source: str
    systems: Sequence[System] = ()
    ablations: Mapping[str, Mapping[str | int, Mapping[str, float]]] = field(default_factory=dict)
    """Tables of `snclr ablate` whose rows it has, instead of `systems`, with the paper's results by value."""
    measures: Sequence[str] = MEASURES
    kind: str = "test"
    epochs: int | None = None
    """Epochs at the paper's scale: of the column that is repeated, or of the first row if rows differ."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the runs."""
    small: Mapping[str, Any] = field(default_factory=dict)
    """Defaults with recipes for little data."""
    tune: Sequence[str] = ()
    seeds: int = 3

    @property
    def needs_coco(self) -> bool:
        """Whether it evaluates detection."""
        return "detect" in self.measures


@functools.cache
def named_studies() -> dict[str, NamedStudy]:
    """Return all named studies. In `paper.yaml`, results are lists of numbers in the order of the study's `metrics`."""
    studies = {}
    text = files("snclr.studies").joinpath("paper.yaml").read_text(encoding="utf-8")
    for name, given in yaml.safe_load(text).items():
        metrics = given.pop("metrics", ())
        rows = [{**row, "reported": _by_metric(row.get("reported", {}), metrics)} for row in given.pop("systems", ())]
        ablations = {table: _by_metric(results, metrics) for table, results in given.pop("ablations", {}).items()}
        studies[name] = NamedStudy(**given, systems=[System(**row) for row in rows], ablations=ablations)
    return studies


def _by_metric(results: Mapping[Any, Sequence[float]], metrics: Sequence[str]) -> dict[Any, dict[str, float]]:
    return {key: dict(zip(metrics, values, strict=True)) for key, values in results.items()}


def get_study(name: str) -> NamedStudy:
    """Return the study of this name; raise UserError with all names if there is none."""
    studies = named_studies()
    if name not in studies:
        raise UserError(f"there is no study {name!r}{did_you_mean(name, studies)}; choose one of {', '.join(studies)}")
    return studies[name]


def describe_study(name: str, study: NamedStudy) -> dict[str, str]:
    """Return the rows of a study in words, by label, and the command that runs it."""
    described = {}
    for system in study.systems:
        settings = ", ".join(f"{key}={value}" for key, value in {**system.settings, **system.paper_only}.items())
        reported = "; ".join(
            f"{f'{epochs} epochs: ' if epochs else ''}{', '.join(f'{m} {v}' for m, v in values.items())}"
            for epochs, values in system.reported.items()
        )
        parts = [system.method, settings, f"paper: {reported}" if reported else ""]
        described[system.label] = "; ".join(filter(None, parts))
    for table, results in study.ablations.items():
        values = "; ".join(f"{value}: {', '.join(map(str, r.values()))}" for value, r in results.items())
        described[f"snclr ablate --table {table}"] = f"paper: {values}"
    if study.tune:
        described["tuned"] = " ".join(f"--tune {text}" for text in study.tune)
    data = "" if "data" in study.settings else " --data imagenet/"
    data += " --coco coco/" if study.needs_coco else ""
    return {**described, "command": f"snclr compare --study {name}{data} --seeds {study.seeds} --out OUT"}


def study_settings(study: NamedStudy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all rows: those given, then the study's defaults."""
    settings = {**study.settings, **{name: value for name, value in given.items() if value is not None}}
    if is_small(settings):
        return {**study.small, **settings}
    return settings if study.epochs is None else {"epochs": study.epochs, **settings}


def is_small(settings: Mapping[str, Any]) -> bool:
    """Whether the recipe is for less data than the paper's."""
    return get_recipe(str(settings.get("recipe", "photos"))).scale == "small"


def study_measures(study: NamedStudy, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what every run is evaluated by: at the paper's scale, the linear probe has the paper's protocol."""
    linear = "linear" if is_small(settings) else "linear-paper"
    return tuple(linear if measure == "linear" else measure for measure in study.measures)


def study_rows(
    study: NamedStudy, settings: Mapping[str, Any], data: DatasetInfo, *, only: Sequence[str] = (),
    own_epochs: bool = True,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Return the rows with the paper's results, and notes, e.g. on the scaling of epochs.

    `only` selects rows by label or method. With `own_epochs`, rows whose epochs differ in the paper differ here too: at
    the paper's scale as printed, else in proportion to the epochs of the first row.
    """
    if study.ablations:
        return _rows_with_results(study, settings, data)
    systems, small = _select(study.systems, only), is_small(settings)
    base = _resolve_snclr(settings).epochs
    rows = [_system_row(study, system, base, small=small, own_epochs=own_epochs) for system in systems]
    notes = []
    if small and own_epochs and any(system.epochs for system in systems):
        notes.append("epochs of the rows are in proportion to the paper's, with those of the first row as given")
    if any(system.reported for system in systems) and not any(row.paper for row in rows):
        notes.append(f"the paper has no results of these rows after {base} epochs")
    return rows, notes


def _select(systems: Sequence[System], only: Sequence[str]) -> list[System]:
    """Return the systems whose label or method is in `only`, all if it is empty."""
    names = [name for system in systems for name in (system.label, system.method)]
    for name in only:
        if name not in names:
            known = ", ".join(system.label for system in systems)
            raise UserError(f"--methods {name}: the study has no such row{did_you_mean(name, names)}; rows: {known}")
    return [system for system in systems if not only or system.label in only or system.method in only]


def _system_row(study: NamedStudy, system: System, base: int, *, small: bool, own_epochs: bool) -> Row:
    """Return the row of a system; `base` are the epochs of rows without their own."""
    untrained, reference = system.method == UNTRAINED, study.epochs or base
    settings = {"method": "snclr" if untrained else system.method, **system.settings}
    if not small:
        settings |= system.paper_only
    if own_epochs and system.epochs is not None:
        settings["epochs"] = max(1, round(base * system.epochs / reference))
    # On little data, the results are those of the table's default column.
    column = 0 if untrained else system.epochs or (reference if small else base)
    return Row(system.label, settings, untrained=untrained, paper=dict(system.reported.get(column, {})))


def _rows_with_results(
    study: NamedStudy, settings: Mapping[str, Any], data: DatasetInfo
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Return the rows of `snclr ablate` with the paper's results; rows of several tables are listed once."""
    rows: dict[str, Row] = {}
    notes = []
    for table, results in study.ablations.items():
        made, rule = ablation_rows(table, fit_queue(_resolve_snclr(settings), data.images), data)
        notes.append(f"rule: {rule}")
        reported = list(results.values())
        first = {} if table == "cost" else reported.pop(0)  # the paper has no cost of the row without neighbors
        # If the rule scales two of the paper's values to the same one, the rows are those of its largest values.
        others = reported[len(reported) + 1 - len(made) :]
        for row, paper in zip(made, [first, *others], strict=True):
            rows.setdefault(row.label, Row(row.label, row.settings, paper=dict(paper)))
    return list(rows.values()), notes


def _resolve_snclr(settings: Mapping[str, Any]) -> PretrainConfig:
    """Resolve the settings for SNCLR, to know those that do not depend on the method."""
    return resolve(given_settings(_row("snclr"), settings))


def ablation_rows(
    table: str, config: PretrainConfig, data: DatasetInfo, values: Sequence[int] | None = None
) -> tuple[list[Row], str]:
    """Return the rows of a table, the one without neighbors first, and the rule with its numbers.

    `values` replaces the rule for K (neighbors) or Q (queue, cost).
    """
    if table not in TABLES:
        raise UserError(f"--table must be one of {', '.join(TABLES)}, not {table!r}")
    if values is not None and (table not in ("neighbors", "queue", "cost") or not values or min(values) < 1):
        raise UserError(
            f"--values {values} is not valid for the table {table}. The tables neighbors, queue and cost take a list of"
            " positive integers, e.g. 10,30,50."
        )
    k, rule = config.neighbors, RULES[table] if values is None else "rows given by --values"
    full_rule = f"{rule}: K = {k}, Q = {config.queue_length:,}"
    if table == "positiveness":
        rows = [_row(f"{weights}, K = {k}", neighbor_weights=weights) for weights in ("hard", "soft")]
        return [NO_NEIGHBORS, *rows], full_rule
    if table == "sides":
        labels = {"positives only": "positives", "negatives only": "negatives", "both": "both"}
        return [NO_NEIGHBORS, *(_row(label, sides=sides) for label, sides in labels.items())], full_rule
    if table == "neighbors":
        expected = None if data.same_class is None else data.same_class * min(config.queue_length, data.images)
        scale = 1.0 if expected is None else min(1.0, expected / PAPER_ENTRIES_PER_CLASS)
        counts = values or sorted({max(1, round(n * scale)) for n in PAPER_NEIGHBORS})
        note = "no labels, not scaled" if expected is None else f"about {expected:,.0f} entries of each class here"
        rows = [_row(f"K = {n}", neighbors=n) for n in counts]
        return [NO_NEIGHBORS, *rows], f"{rule}: {note}; Q = {config.queue_length:,}"
    lengths = list(values) if values else queue_lengths(config, data)
    if max(lengths) < k:
        raise UserError(f"all queues ({lengths}) are shorter than K = {k}. Give a lower --neighbors or longer --values")
    shares = f"{lengths[0] / data.images:.1%} to {lengths[-1] / data.images:.1%} of the {data.images:,} images"
    first = Row("no neighbors", {**NO_NEIGHBORS.settings, "queue_length": 1}) if table == "cost" else NO_NEIGHBORS
    rows = [_row(f"Q = {length:,}", queue_length=length) for length in lengths]
    return [first, *rows], f"{rule}: {shares} (the paper: 0.6 % to 10 %), K = {k}"


def queue_lengths(config: PretrainConfig, data: DatasetInfo) -> list[int]:
    """Return the longest queue and its halvings in increasing order, none shorter than K."""
    longest = min(config.queue_length, data.images)
    return sorted({max(longest // 2**i, config.neighbors) for i in range(HALVINGS + 1)})


def _row(label: str, **settings: Any) -> Row:
    return Row(label, {"method": "snclr", **settings})
