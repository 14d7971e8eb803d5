"""Run a study: calibrate the budget, tune the rows, train and evaluate them, write one table. Or estimate its time."""

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from snclr.io.atomic import check_writable, write_atomic
from snclr.io.locking import FileLock, lock_folder
from snclr.runtime.progress import set_status
from snclr.studies.conditions import best_settings, measured_seconds
from snclr.studies.options import StudyOptions
from snclr.studies.protocol import StageResults, study_record
from snclr.studies.records import Records, write_record
from snclr.studies.runner import execute
from snclr.studies.runs import Evaluation, Run
from snclr.studies.study import Study

_TRIAL_STEPS = 5
"""Steps that a dry run measures."""


@dataclass(frozen=True)
class StudyResult:
    """The table of a study, the files it was written to, and the runs that failed."""

    table: dict[str, Any]
    """Rows, statistics and protocol, as written to the JSON file."""
    files: dict[str, str]
    failed: dict[str, str]
    """The reason of each failed run, by its title."""

    @property
    def exit_code(self) -> int:
        """1 if a run failed, else 0."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**self.table, "exit_code": self.exit_code, "failed": self.failed, "files": self.files}


@dataclass(frozen=True)
class StudyEstimate:
    """What a study would train and how long it would take."""

    title: str
    rule: str
    runs: list[dict[str, Any]]
    """Title, directory and whether it is finished, for each run."""
    pending: int
    tuning: int
    """Runs that only choose hyperparameters."""
    seconds: float | None
    """Expected duration of the pending runs; None if the trial steps failed."""
    how: str
    """What `seconds` is derived from."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"exit_code": 0, "dry_run": True, **asdict(self)}


def run_study(study: Study) -> StudyResult | StudyEstimate:
    """Calibrate, tune, train and evaluate the pending runs, then write table and figures.

    Raise StopRequested after a stop. Each stage reads the records of the one before, so the same call continues with
    the same epochs and settings. A dry run only estimates the duration.
    """
    if study.options.dry_run:
        return estimate_study(study)
    options, records, out = study.options, study.options.records, Path(study.options.out)
    lock = FileLock(out / ".snclr-compare.lock")
    lock_folder(lock, "another comparison", "choose another --out folder")
    try:
        check_writable(records.folder / "record", "choose another --results folder")
        stages = StageResults()
        _calibrate(study, stages)
        _tune(study, stages)
        runs = study.runs(stages.chosen, stages.epochs)
        outcome = execute(runs, options, study.images)
        record = study_record(study, runs, stages)
        write_record(record, records.studies / f"{study.name}.json")
        files, table = write_files(record, records, out)
    finally:
        lock.release()
    outcome.raise_if_stopped()
    return StudyResult(table, files, {**stages.failed, **outcome.failed})


def _calibrate(study: Study, stages: StageResults) -> None:
    """Measure the seconds per step of each row, one row at a time, and compute the epochs of the rows.

    A row that is recorded as measured is not measured again: a continued study has the same epochs.
    """
    runs = study.calibration_runs()
    outcome = execute(runs, replace(study.options, jobs=1), study.images)
    outcome.raise_if_stopped()
    stages.calibration = {run.label: outcome.records[run.key] for run in runs if run.key in outcome.records}
    stages.epochs = study.equal_epochs({label: measured_seconds(r) for label, r in stages.calibration.items()})
    missing = [run.label for run in runs if run.label not in stages.epochs]
    stages.failed |= outcome.failed | dict.fromkeys(missing, "its budget could not be measured")


def _tune(study: Study, stages: StageResults) -> None:
    """Run the trials of every row and choose the settings with the best validation kNN."""
    by_row = study.tuning_runs(stages.epochs)
    stages.trials = {label: [] if label in stages.failed else trials for label, trials in by_row.items()}
    outcome = execute([run for trials in stages.trials.values() for _, run in trials], study.options, study.images)
    outcome.raise_if_stopped()
    stages.scores = {key: record["numbers"]["knn"] for key, record in outcome.records.items()}
    for label, trials in stages.trials.items():
        if scored := [(settings, stages.scores[run.key]) for settings, run in trials if run.key in stages.scores]:
            stages.chosen[label] = best_settings(scored)
        elif trials:
            stages.failed[label] = "all of its tuning runs failed"


def write_files(study: dict[str, Any], records: Records, out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Write the table (JSON, Markdown) and the figures under the study's name; return their paths and the table."""
    from snclr.reports.figures.comparison import draw_comparison, draw_neighbor_purity
    from snclr.studies.tables import build_table, markdown

    table = build_table(study, records)
    stem = out / study["name"]
    files = {"markdown": f"{stem}.md", "json": f"{stem}.json"}
    write_atomic(files["markdown"], markdown(table))
    write_atomic(files["json"], json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    if draw_comparison(table, f"{stem}.png"):
        files["figure"] = f"{stem}.png"
    if draw_neighbor_purity(study, records.by_row(study), f"{stem}-purity.png"):
        files["purity"] = f"{stem}-purity.png"
    return files, table


def estimate_study(study: Study) -> StudyEstimate:
    """Estimate the time of a study from its finished runs, or from a few steps of its first run; write nothing.

    With a budget in seconds, rows that are not calibrated yet count with the epochs as given.
    """
    find = study.options.records.find
    calibrated = {run.label: measured_seconds(r) for run in study.calibration_runs() if (r := find(run)) is not None}
    epochs = {row.label: study.own_epochs(row) for row in study.rows} | study.equal_epochs(calibrated)
    by_row = study.tuning_runs(epochs)
    tuning = [run for trials in by_row.values() for _, run in trials]
    runs = tuning + study.runs({label: trials[0][0] for label, trials in by_row.items() if trials}, epochs)
    records = {run.key: find(run) for run in runs}
    pending = [run for run in runs if records[run.key] is None]
    rates = [r["cost"]["seconds"] / study.images(run) for run in runs if (r := records[run.key]) and study.images(run)]
    source = "from the finished runs"
    trained = [run for run in pending if study.images(run)]
    if not trained:
        rates, source = rates or [0.0], "nothing is left to train"
    elif not rates:
        set_status(f"measuring some steps of {trained[0].label}")
        rates = _measure_rate(trained[0])
        source = f"from a few steps of {trained[0].label}; other rows may differ"
    return StudyEstimate(
        study.title, study.rule,
        runs=[{"run": r.title, "folder": r.folder, "finished": records[r.key] is not None} for r in runs],
        pending=len(pending), tuning=len(tuning),
        seconds=sum(map(study.images, pending)) * sum(rates) / len(rates) / study.options.jobs if rates else None,
        how=source if rates else "unknown: the trial steps failed",
    )  # fmt: skip


def _measure_rate(run: Run) -> list[float]:
    """Return the seconds per image of a few steps in a subprocess; [] if it failed."""
    trial = replace(run, evaluation=Evaluation(kind="cost", steps=_TRIAL_STEPS))
    with tempfile.TemporaryDirectory(prefix="snclr-dry-run-", ignore_cleanup_errors=True) as folder:
        outcome = execute([trial], StudyOptions(out=folder, quiet=True), lambda _: 1)
    outcome.raise_if_stopped()
    return [r["numbers"]["seconds_per_step"] / run.settings["batch_size"] for r in outcome.records.values()]
