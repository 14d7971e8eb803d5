"""`snclr.compare` and `snclr.ablate`: methods or settings × seeds under equal conditions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.benchmark.study import Study, StudyEstimate, StudyResult


def compare(
    *,
    methods: str | Sequence[str] = "snclr,nnclr,mocov3",
    tune: Sequence[str] = (),
    seeds: int | str | Sequence[int] = 3,
    out: str | Path,
    results: str | Path | None = None,
    name: str = "compare",
    eval_data: str | None = None,
    test: str | None = None,
    k: int = 200,
    jobs: int = 1,
    keep_runs: bool = False,
    dry_run: bool = False,
    config: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> StudyResult | StudyEstimate:
    """Train several methods over several seeds and compare their kNN and linear accuracy.

    Finished runs are kept: calling it again trains only what is missing. A dry run returns a `StudyEstimate`.

    Args:
        methods: Rows of the table, separated by commas: METHOD or METHOD:NAME=VALUE,...; `snclr methods` lists them.
        tune: NAME=A,B,...: select one of these values for each row by kNN accuracy on a held-out tenth of the training
            set, with a separate seed; may be given several times.
        seeds: A number of seeds, or a list such as 0,4,7.
        out: Directory for the runs, the table and the figures.
        results: Directory for the record of each run (default: OUT/results).
        name: Name of the table and its files.
        eval_data: Labeled images to evaluate on (default: the training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        k: Neighbors that vote in the kNN evaluation.
        jobs: Number of runs in parallel; with more than one, timings are unreliable.
        keep_runs: Keep the checkpoints of finished runs, not only encoder and metrics.
        dry_run: Only list the runs and estimate their duration.
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        quiet: Print no progress.
        settings: Those of `snclr.pretrain`, equal for all rows.
    """
    from snclr.benchmark.datasets import check_test_images, inspect_dataset
    from snclr.benchmark.plan import Evaluation, parse_methods, parse_seeds, parse_tune
    from snclr.benchmark.study import Study, check_settings, check_tuning, command_line

    settings = _merge(config, settings)
    entries, grid, seed_list = parse_methods(methods), parse_tune(tune), parse_seeds(seeds)
    check_settings(settings, [str(entry.settings["method"]) for entry in entries])
    check_tuning(entries, grid)
    data = inspect_dataset(str(settings.get("data") or ""))
    evaluation, note = check_test_images(Evaluation(data=eval_data, test=test, k=k), data, settings["data"], entries)
    given = {
        "methods": ",".join(entry.label for entry in entries), "seeds": seeds, "eval_data": eval_data, "test": test,
        "k": None if k == 200 else k, "tune": list(tune), "name": None if name == "compare" else name, **settings,
    }  # fmt: skip
    study = Study(
        name=name, title=f"{data.name}: {_count(len(entries), 'row')}, {_count(len(seed_list), 'seed')}",
        entries=entries, seeds=seed_list, common=settings, evaluation=evaluation, data=data,
        command=command_line("compare", given), grid=grid, notes=[note] if note else [],
    )  # fmt: skip
    return _run(study, out, results, jobs=jobs, keep_runs=keep_runs, dry_run=dry_run, quiet=quiet)


def ablate(
    *,
    table: Literal["positiveness", "neighbors", "queue", "sides", "cost"],
    values: str | Sequence[int] | None = None,
    steps: int = 30,
    seeds: int | str | Sequence[int] = 3,
    out: str | Path,
    results: str | Path | None = None,
    name: str | None = None,
    eval_data: str | None = None,
    test: str | None = None,
    k: int = 200,
    jobs: int = 1,
    keep_runs: bool = False,
    dry_run: bool = False,
    config: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> StudyResult | StudyEstimate:
    """Repeat one of the paper's ablation tables on your images.

    Tables with the same `out` share their runs. A dry run returns a `StudyEstimate`.

    Args:
        table: Which of the paper's tables; described below.
        values: K (table neighbors) or Q (tables queue and cost) of the rows, e.g. 10,30,50 (default: see below).
        steps: Training steps to measure for table cost.
        seeds: A number of seeds, or a list such as 0,4,7.
        out: Directory for the runs, the table and the figures.
        results: Directory for the record of each run (default: OUT/results).
        name: Name of the table and its files (default: ablate-TABLE).
        eval_data: Labeled images to evaluate on (default: the training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        k: Neighbors that vote in the kNN evaluation.
        jobs: Number of runs in parallel; with more than one, timings are unreliable.
        keep_runs: Keep the checkpoints of finished runs, not only encoder and metrics.
        dry_run: Only list the runs and estimate their duration.
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        quiet: Print no progress.
        settings: Those of `snclr.pretrain`, equal for all rows.
    """
    from snclr.benchmark.ablations import TABLES, ablation_rows
    from snclr.benchmark.datasets import check_test_images, inspect_dataset
    from snclr.benchmark.plan import Evaluation, parse_seeds
    from snclr.benchmark.study import Study, check_settings, command_line
    from snclr.train.config import resolve

    settings = _merge(config, settings)
    check_settings(settings)
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    data, numbers = inspect_dataset(str(settings.get("data") or "")), _numbers(values)
    entries, rule = ablation_rows(table, resolve(settings), data, numbers)
    evaluation, notes = Evaluation(kind="cost", steps=steps), []
    if table != "cost":
        evaluation, note = check_test_images(
            Evaluation(data=eval_data, test=test, k=k), data, settings["data"], entries
        )
        notes = [note, "every row searches neighbors, even if its loss uses none, to measure neighbor purity"]
    default_name = f"ablate-{table}"
    given = {
        "table": table, "values": numbers, "seeds": seeds, "eval_data": eval_data, "test": test,
        "k": None if k == 200 else k, "steps": steps if table == "cost" and steps != 30 else None,
        "name": None if name in (None, default_name) else name, **settings,
    }  # fmt: skip
    study = Study(
        name=name or default_name, title=f"{data.name}: {TABLES[table]}", entries=entries, seeds=parse_seeds(seeds),
        common=settings, evaluation=evaluation, data=data, command=command_line("ablate", given), rule=rule,
        notes=[note for note in notes if note],
    )  # fmt: skip
    return _run(study, out, results, jobs=jobs, keep_runs=keep_runs, dry_run=dry_run, quiet=quiet)


def _run(
    study: Study, out: str | Path, results: str | Path | None, *, jobs: int, keep_runs: bool, dry_run: bool, quiet: bool
) -> StudyResult | StudyEstimate:
    from snclr.benchmark.records import Records
    from snclr.benchmark.runner import Workspace
    from snclr.benchmark.study import estimate_study, run_study

    records = Records(results or Path(out) / "results")
    workspace = Workspace(Path(out), records, jobs=jobs, keep_runs=keep_runs, quiet=quiet)
    return estimate_study(study, workspace) if dry_run else run_study(study, workspace)


def _merge(config: str | Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Add the settings of a config.yaml, except those that the study sets for each run; the ones given win."""
    from snclr.train.config import REMOVED_SETTINGS, read_config

    saved = {} if config is None else read_config(Path(config))
    ignored = {*REMOVED_SETTINGS, "method", "seed", "out", "resume", "overwrite"}
    return {**{name: value for name, value in saved.items() if value is not None and name not in ignored}, **settings}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _numbers(values: str | Sequence[int] | None) -> list[int] | None:
    if values is None:
        return None
    try:
        return [int(part) for part in (values.split(",") if isinstance(values, str) else values) if str(part).strip()]
    except ValueError:
        raise UserError(f"--values takes whole numbers, e.g. 10,30,50, not {values!r}") from None
