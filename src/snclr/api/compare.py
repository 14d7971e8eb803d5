"""`snclr.compare` and `snclr.ablate`: methods or settings × seeds under equal conditions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path  # noqa: F401 (a type of StudyOptions, looked up here)
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from snclr.errors import UserError, count
from snclr.studies.options import StudyOptions

if TYPE_CHECKING:
    from snclr.studies.study import StudyEstimate, StudyResult

F = TypeVar("F", bound=Callable[..., Any])


def _with_study_options(function: F) -> F:
    """Add the fields of `StudyOptions` to signature and docstring, which the flags are generated from."""
    *own_parameters, keywords = inspect.signature(function).parameters.values()
    parameters = [*own_parameters, *inspect.signature(StudyOptions).parameters.values(), keywords]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__doc__ = f"{function.__doc__}{str(StudyOptions.__doc__).partition('Args:')[2]}"
    return function


@_with_study_options
def compare(
    *,
    methods: str | Sequence[str] = "snclr,nnclr,mocov3",
    tune: Sequence[str] = (),
    name: str = "compare",
    **keywords: Any,
) -> StudyResult | StudyEstimate:
    """Train several methods over several seeds and compare their kNN and linear accuracy.

    Further keywords are the fields of `StudyOptions` and the settings of `snclr.pretrain`, equal for all rows. Finished
    runs are kept: calling it again trains only what is missing. A dry run returns a `StudyEstimate`.

    Args:
        methods: Rows of the table, separated by commas: METHOD or METHOD:NAME=VALUE,...; `snclr methods` lists them.
        tune: NAME=A,B,...: select one of these values for each row by kNN accuracy on a held-out tenth of the training
            set, with a separate seed; may be given several times.
        name: Name of the table and its files.
    """
    from snclr.data.info import inspect_dataset
    from snclr.studies.leakage import check_test_images
    from snclr.studies.runs import Evaluation, parse_methods, parse_tune
    from snclr.studies.study import Study, check_settings, command_line, run_study

    options, settings = StudyOptions.split(keywords)
    rows, grid = parse_methods(methods), parse_tune(tune)
    check_settings(settings, rows, grid)
    data = inspect_dataset(settings.get("data") or "")
    evaluation = Evaluation(data=options.eval_data, test=options.test, k=options.k)
    evaluation, notes = check_test_images(evaluation, data, settings["data"], rows)
    flags = {"methods": ",".join(row.label for row in rows), "tune": tune, "name": None if name == "compare" else name}
    title = f"{data.name}: {count(len(rows), 'row')}, {count(len(options.seed_list), 'seed')}"
    command = command_line("compare", {**flags, **options.recorded(), **settings})
    return run_study(
        Study(options, name, title, rows, settings, evaluation, data, command, grid=grid, notes=notes)
    )  # fmt: skip


@_with_study_options
def ablate(
    *,
    table: Literal["positiveness", "neighbors", "queue", "sides", "cost"],
    values: str | Sequence[int] | None = None,
    steps: int = 30,
    name: str | None = None,
    **keywords: Any,
) -> StudyResult | StudyEstimate:
    """Repeat one of the paper's ablation tables on your images.

    Further keywords are the fields of `StudyOptions` and the settings of `snclr.pretrain`, equal for all rows. Tables
    with the same `out` share their runs. A dry run returns a `StudyEstimate`.

    Args:
        table: Which of the paper's tables; described below.
        values: K (table neighbors) or Q (tables queue and cost) of the rows, e.g. 10,30,50 (default: see below).
        steps: Training steps to measure for table cost.
        name: Name of the table and its files (default: ablate-TABLE).
    """
    from snclr.data.info import inspect_dataset
    from snclr.studies.ablations import NO_NEIGHBORS, TABLES, ablation_rows
    from snclr.studies.leakage import check_test_images
    from snclr.studies.runs import Evaluation
    from snclr.studies.study import Study, check_settings, command_line, run_study
    from snclr.train.config import fit_queue, resolve

    options, settings = StudyOptions.split(keywords)
    check_settings(settings, [NO_NEIGHBORS])
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    data, numbers = inspect_dataset(settings.get("data") or ""), _numbers(values)
    rows, rule = ablation_rows(table, fit_queue(resolve(settings), data.images), data, numbers)
    evaluation, notes = Evaluation(kind="cost", steps=steps), list[str]()
    if table != "cost":
        evaluation = Evaluation(data=options.eval_data, test=options.test, k=options.k)
        evaluation, notes = check_test_images(evaluation, data, settings["data"], rows)
        notes += ["every row searches neighbors, even if its loss uses none, to measure neighbor purity"]
    flags = {
        "table": table, "values": numbers, "steps": steps if table == "cost" and steps != 30 else None,
        "name": None if name == f"ablate-{table}" else name,
    }  # fmt: skip
    name, title = name or f"ablate-{table}", f"{data.name}: {TABLES[table]}"
    command = command_line("ablate", {**flags, **options.recorded(), **settings})
    return run_study(Study(options, name, title, rows, settings, evaluation, data, command, rule=rule, notes=notes))


def _numbers(values: str | Sequence[int] | None) -> list[int] | None:
    if values is None:
        return None
    try:
        return [int(part) for part in (values.split(",") if isinstance(values, str) else values) if str(part).strip()]
    except ValueError:
        raise UserError(f"--values takes whole numbers, e.g. 10,30,50, not {values!r}") from None
