"""Named studies: the paper's tables and the small table of all methods, as rows and settings of `snclr compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snclr.data.info import DatasetInfo
from snclr.errors import UserError, did_you_mean
from snclr.recipes import get_recipe
from snclr.studies.paper.ablations import ablation_rows
from snclr.studies.paper.reported import ABLATIONS, SMALL_VIT, TABLES, NamedStudy, System
from snclr.studies.runs import UNTRAINED, Row
from snclr.train.config import fit_queue, resolve, settings_for_method


def _ablation(source: str, title: str, *tables: str) -> NamedStudy:
    kind = "cost" if tables == ("cost",) else "test"
    return NamedStudy(
        title, source, ablations=tables, kind=kind, epochs=300, settings={"recipe": "vit-small-imagenet"},
        small=SMALL_VIT, seeds=1,
    )  # fmt: skip


_ALL: tuple[System, ...] = (
    System("snclr", "snclr"),
    System("simclr", "simclr"),
    System("moco", "moco"),
    System("mocov2", "mocov2", settings={"symmetric": True}),
    System("infomin", "mocov2", settings={"views": "infomin"}),
    System("mocov3", "mocov3"),
    System("byol", "byol"),
    System("simsiam", "simsiam"),
    System("nnclr", "nnclr"),
    System("swav", "swav"),
    System("barlowtwins", "barlowtwins", settings={"dim": 1024, "hidden": 1024}),
    System("dino", "dino"),
    System("pirl", "pirl"),
    System("detco", "detco"),
    System("mae (ViT)", "mae", settings={**SMALL_VIT, "decoder_dim": 64, "decoder_layers": 1, "decoder_heads": 2}),
    System("cae (ViT)", "cae", settings={**SMALL_VIT, "decoder_layers": 1, "regressor_layers": 1}),
    System("supervised", "supervised"),
    System("random", UNTRAINED),
    System("random (ViT)", UNTRAINED, settings=SMALL_VIT),
)

STUDIES: dict[str, NamedStudy] = {
    **TABLES,
    "table-4-neighbors": _ablation("Table 4", "positiveness and number of neighbors", "positiveness", "neighbors"),
    "table-5-queue": _ablation("Table 5", "length of the candidate set", "queue"),
    "table-6-cost": _ablation("Table 6", "memory and seconds per step over the set length", "cost"),
    "table-7-sides": _ablation("Table 7", "neighbors among positives and negatives", "sides"),
    "all-methods-small": NamedStudy(
        "all systems of the paper, supervised and untrained, on the demo images", "docs/results/all-methods.md", _ALL,
        settings={"data": "demo", "recipe": "demo", "epochs": 6},
        tune=("lr=x1,x3",),
    ),
}  # fmt: skip


def get_study(name: str) -> NamedStudy:
    """Return the study of this name; raise UserError with all names if there is none."""
    if name not in STUDIES:
        raise UserError(f"there is no study {name!r}{did_you_mean(name, STUDIES)}; choose one of {', '.join(STUDIES)}")
    return STUDIES[name]


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
    for table in study.ablations:
        values = "; ".join(f"{value}: {', '.join(map(str, f.values()))}" for value, f in ABLATIONS[table].items())
        described[f"snclr ablate --table {table}"] = f"paper: {values}"
    if study.tune:
        described["tuned"] = " ".join(f"--tune {text}" for text in study.tune)
    flags = " ".join(filter(None, [study.example, f"--seeds {study.seeds}"]))
    return {**described, "command": f"snclr compare --study {name} {flags} --out OUT"}


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
    if is_small(settings):
        return study.measures
    return tuple("linear-paper" if measure == "linear" else measure for measure in study.measures)


def study_rows(
    study: NamedStudy, settings: Mapping[str, Any], data: DatasetInfo, *, only: Sequence[str] = (),
    own_epochs: bool = True,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Return the rows with the paper's results, and notes, e.g. on the scaling of epochs.

    `only` selects rows by label or method. With `own_epochs`, rows whose epochs differ in the paper differ here too: at
    the paper's scale as printed, else in proportion to the epochs of the first row.
    """
    if study.ablations:
        return _ablation_rows(study, settings, data)
    systems, small = _select(study.systems, only), is_small(settings)
    base = resolve({"method": "snclr", **_run_settings(settings)}).epochs
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


def _ablation_rows(
    study: NamedStudy, settings: Mapping[str, Any], data: DatasetInfo
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Return the rows of `snclr ablate` with the paper's results; rows of several tables are listed once."""
    config = fit_queue(resolve({"method": "snclr", **_run_settings(settings)}), data.images)
    rows: dict[str, Row] = {}
    notes = []
    for table in study.ablations:
        made, rule = ablation_rows(table, config, data)
        notes.append(f"rule: {rule}")
        reported = list(ABLATIONS[table].values())
        first = {} if table == "cost" else reported.pop(0)  # the paper has no cost of the row without neighbors
        # If the rule scales two of the paper's values to the same one, the rows are those of its largest values.
        others = reported[len(reported) + 1 - len(made) :]
        for row, paper in zip(made, [first, *others], strict=True):
            rows.setdefault(row.label, Row(row.label, row.settings, paper=dict(paper)))
    return list(rows.values()), notes


def _run_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that SNCLR uses, to resolve what does not depend on the method."""
    return settings_for_method("snclr", settings)
