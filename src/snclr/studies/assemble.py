"""Assemble the studies of `snclr compare` and `snclr ablate` from their flags and, if one is named, a named study."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from snclr.data.info import DatasetInfo, inspect_dataset
from snclr.data.splits import has_own_test_split
from snclr.data.validation_split import FIT
from snclr.errors import UserError, count
from snclr.studies import paper
from snclr.studies.conditions import TUNE_SEED, evaluation_on_test_images, parse_budget, parse_tune
from snclr.studies.options import StudyOptions
from snclr.studies.runs import Evaluation, Row, given_settings, parse_methods
from snclr.studies.study import Study, check_settings, command_line, used_settings
from snclr.train.config import fit_queue, resolve

DEFAULT_METHODS = "snclr,nnclr,mocov3"


def assemble_comparison(
    options: StudyOptions, settings: dict[str, Any], *, methods: str | Sequence[str] | None, study: str | None,
    budget: str | None, tune: Sequence[str], tune_seed: int, coco: str | None, name: str | None,
) -> Study:  # fmt: skip
    """Return the study; raise UserError before anything is trained if it is not possible."""
    given, named = dict(settings), None if study is None else paper.get_study(study)
    methods = methods if methods is None or isinstance(methods, str) else ",".join(methods)
    flags = {
        "study": study, "methods": methods, "budget": budget, "tune": tune,
        "tune_seed": None if tune_seed == TUNE_SEED else tune_seed, "coco": coco, "name": name,
    }  # fmt: skip
    notes: list[str] = []
    if named is None:
        rows = parse_methods(DEFAULT_METHODS if methods is None else methods)
        flags["methods"] = ",".join(row.label for row in rows)
        check_settings(settings, rows)
        data = inspect_dataset(settings.get("data") or "")
    else:
        settings, tune = paper.study_settings(named, settings), tune or named.tune
        data = inspect_dataset(settings.get("data") or "")
        only = methods.split(",") if methods else ()
        rows, notes = paper.study_rows(named, settings, data, only=only, own_epochs=budget is None)
        settings = used_settings(settings, rows)  # the study's own defaults are for all its rows
        notes.insert(0, _source(named, settings))
    axes = parse_tune(tune)
    own_test = options.test is not None or has_own_test_split(settings["data"])
    holds_out = options.eval_data is None and own_test  # tuning runs do not train on the validation images
    check_settings(settings, rows, axes, holds_out_validation=holds_out)
    _check_rows(options, settings, rows, data, detects=named is not None and named.needs_coco)
    evaluation, more = _evaluation(options, named, settings, data, rows, coco)
    return Study(
        options, name or study or "compare", _title(data, named, rows, options), rows, settings, evaluation, data,
        command_line("compare", {**flags, **options.recorded(), **given}), axes=axes, tune_seed=tune_seed,
        budget=parse_budget(budget), notes=[*notes, *more],
        fit=inspect_dataset(settings["data"] + FIT) if axes and holds_out else None,
    )  # fmt: skip


def assemble_ablation(
    options: StudyOptions, settings: dict[str, Any], *, table: str, values: str | Sequence[int] | None, steps: int,
    name: str | None,
) -> Study:  # fmt: skip
    """Return the study of an ablation table; raise UserError before anything is trained if it is not possible."""
    check_settings(settings, [paper.NO_NEIGHBORS])
    data = inspect_dataset(settings.get("data") or "")
    try:
        parts = values.split(",") if isinstance(values, str) else values
        numbers = None if parts is None else [int(part) for part in parts if str(part).strip()]
    except ValueError:
        raise UserError(f"--values takes whole numbers, e.g. 10,30,50, not {values!r}") from None
    rows, rule = paper.ablation_rows(table, fit_queue(resolve(settings), data.images), data, numbers)
    _check_rows(options, settings, rows, data)
    evaluation, notes = Evaluation(kind="cost", steps=steps), list[str]()
    if table != "cost":
        evaluation, notes = evaluation_on_test_images(options, data, settings["data"], rows)
        notes += ["every row searches neighbors, even if its loss uses none, to measure neighbor purity"]
    flags = {
        "table": table, "values": numbers, "steps": steps if table == "cost" and steps != 30 else None,
        "name": None if name == f"ablate-{table}" else name,
    }  # fmt: skip
    name, title = name or f"ablate-{table}", f"{data.name}: {paper.TABLES[table]}"
    command = command_line("ablate", {**flags, **options.recorded(), **settings})
    return Study(options, name, title, rows, settings, evaluation, data, command, rule=rule, notes=notes)


def _check_rows(
    options: StudyOptions, settings: dict[str, Any], rows: Sequence[Row], data: DatasetInfo, *, detects: bool = False
) -> None:
    """Raise UserError before anything is trained if a row cannot be trained.

    Its neighbors must fit the images and the queue. Unless it is a dry run, the device must fit and, for detection, the
    encoder.
    """
    from snclr.evaluation.detection.model import check_detectable
    from snclr.runtime.device import pick_device
    from snclr.runtime.machine import check_precision
    from snclr.train.build import encoder_spec

    for row in rows:
        config = fit_queue(resolve(given_settings(row, settings)), data.images)
        if not options.dry_run:
            check_precision(pick_device(config.device), config.precision)
            if detects:
                check_detectable(encoder_spec(config))


def _title(data: DatasetInfo, named: paper.NamedStudy | None, rows: Sequence[Row], options: StudyOptions) -> str:
    """Return data, topic and size of the study. The data of a table of the paper may be other than the paper's."""
    topic = "" if named is None else f"{named.title}, "
    if named is not None and named.epochs is not None:
        topic = f"rows of {named.source} of the paper, "
    return f"{data.name}: {topic}{count(len(rows), 'row')}, {count(len(options.seed_list), 'seed')}"


def _source(named: paper.NamedStudy, settings: dict[str, Any]) -> str:
    """Return where the rows and the results of the paper come from."""
    if not any(system.reported for system in named.systems) and not named.ablations:
        return f"protocol: {named.source}"
    rows_differ = any(system.epochs for system in named.systems)
    epochs = f", {named.epochs} epochs" if named.epochs and paper.is_small(settings) and not rows_differ else ""
    return f"paper: {named.source} of Ge et al. (ICLR 2023), on ImageNet{epochs}; * trained by its authors"


def _evaluation(
    options: StudyOptions, named: paper.NamedStudy | None, settings: dict[str, Any], data: DatasetInfo,
    rows: Sequence[Row], coco: str | None,
) -> tuple[Evaluation, list[str]]:  # fmt: skip
    """Return how the runs are evaluated, after a check of the test images, and notes."""
    if named is not None and named.kind == "cost":
        return Evaluation(kind="cost", steps=30), []
    evaluation, notes = evaluation_on_test_images(options, data, settings["data"], rows)
    if named is None:
        if coco is not None:
            raise UserError("--coco is for studies that measure detection, e.g. --study table-3-detection")
        return evaluation, notes
    evaluation = replace(evaluation, measures=paper.study_measures(named, settings))
    if not named.needs_coco:
        return evaluation, notes
    if coco is None:
        raise UserError("this study measures detection: give the COCO data with --coco FOLDER")
    from snclr.evaluation.detection.coco import open_coco

    train, val, _ = open_coco(coco)
    fingerprint = evaluation.fingerprint + train.fingerprint() + val.fingerprint()
    recipe = "cpu" if paper.is_small(settings) else "1x"
    return replace(evaluation, coco=coco, detect_recipe=recipe, fingerprint=fingerprint), notes
