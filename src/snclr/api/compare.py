"""`snclr.compare` and `snclr.ablate`: methods or settings × seeds under equal conditions."""

import inspect
from collections.abc import Sequence
from pathlib import Path  # noqa: F401 (a type of StudyOptions, looked up here)
from typing import Any, Literal

from snclr.api.early_checks import check_folder, check_numbers
from snclr.api.options import FunctionT, describe
from snclr.runtime.settings import Range
from snclr.studies.options import StudyOptions
from snclr.studies.run_study import StudyEstimate, StudyResult, run_study


def _with_study_options(function: FunctionT) -> FunctionT:
    """Add the fields of `StudyOptions` to signature and docstring, which the flags are generated from."""
    *own_parameters, keywords = inspect.signature(function).parameters.values()
    parameters = [*own_parameters, *inspect.signature(StudyOptions).parameters.values(), keywords]
    return describe(function, parameters, f"{function.__doc__}{str(StudyOptions.__doc__).partition('Args:')[2]}")


@_with_study_options
def compare(
    *,
    methods: str | Sequence[str] | None = None,
    study: str | None = None,
    budget: str | None = None,
    tune: Sequence[str] = (),
    tune_seed: int = 1_000_000,
    coco: str | None = None,
    name: str | None = None,
    **keywords: Any,
) -> StudyResult | StudyEstimate:
    """Train several methods over several seeds and compare their kNN and linear accuracy.

    Further keywords are the fields of `StudyOptions` and the settings of `snclr.pretrain`, equal for all rows. Finished
    runs are kept: calling it again trains only what is missing. A dry run returns a `StudyEstimate`.

    Args:
        methods: Rows of the table, separated by commas: METHOD or METHOD:NAME=VALUE,...; `snclr methods` lists them,
            random is the untrained encoder (default: snclr,nnclr,mocov3; with --study all its rows).
        study: A table of the paper, or another named study; `snclr studies` lists them.
        budget: What is equal for all rows: steps, images (seen by the encoder) or seconds (of CPU or GPU), or one of
            them with an amount such as seconds=600 (default: the same epochs; with --study those of the paper).
        tune: NAME=A,B,...: try these values for each row and take the best by kNN on a tenth of the training set, with
            a separate seed; xA is A times the row's own value, NAME=A,B/OTHER=C,D has another setting for methods
            without the first; may be given several times; none leaves out the tuning of a study.
        tune_seed: Seed of the tuning runs, which no compared run may have.
        coco: Folder with the COCO data of a study that measures detection.
        name: Name of the table and its files (default: compare, or the name of the study).
    """
    options, settings = StudyOptions.split(keywords)
    check_folder(options.out)
    from snclr.studies.assemble import assemble_comparison

    plan = assemble_comparison(
        options, settings, methods=methods, study=study, budget=budget, tune=tune, tune_seed=tune_seed, coco=coco,
        name=name,
    )  # fmt: skip
    return run_study(plan)


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
    check_numbers(Range(ge=1), steps=steps)
    options, settings = StudyOptions.split(keywords)
    check_folder(options.out)
    from snclr.studies.assemble import assemble_ablation

    return run_study(assemble_ablation(options, settings, table=table, values=values, steps=steps, name=name))
