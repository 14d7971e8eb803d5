"""Run a study: calibrate the budget, tune the rows, train and evaluate them, and write one table."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snclr.io.atomic import check_writable, write_atomic
from snclr.io.locking import FileLock, lock_folder
from snclr.runtime.stop import StopRequested
from snclr.studies.conditions.budget import measured_seconds
from snclr.studies.conditions.tuning import best_trial
from snclr.studies.estimate import StudyEstimate, estimate_study
from snclr.studies.options import StudyOptions
from snclr.studies.protocol import StageResults, study_record
from snclr.studies.records import Records, write_record
from snclr.studies.runner import Outcome, execute
from snclr.studies.runs import Run
from snclr.studies.study import Study


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
        found, failed = StageResults(), dict[str, str]()
        _calibrate(study, found, failed)
        _tune(study, found, failed)
        runs = study.runs(found.chosen, found.epochs)
        outcome = execute(runs, options, study.images)
        record = study_record(study, runs, found)
        write_record(record, records.studies / f"{study.name}.json")
        files, table = write_files(record, records, out)
    finally:
        lock.release()
    if outcome.stopped_by is not None:
        raise StopRequested(outcome.stopped_by)
    return StudyResult(table, files, {**failed, **outcome.failed})


def _calibrate(study: Study, found: StageResults, failed: dict[str, str]) -> None:
    """Measure the seconds per step of each row, one row at a time, and compute the epochs of the rows.

    A row that is recorded as measured is not measured again: a continued study has the same epochs.
    """
    runs = study.calibration_runs()
    outcome = _execute(runs, replace(study.options, jobs=1), study)
    found.calibration = {run.label: outcome.records[run.key] for run in runs if run.key in outcome.records}
    found.epochs = study.equal_epochs({label: measured_seconds(r) for label, r in found.calibration.items()})
    missing = [run.label for run in runs if run.label not in found.epochs]
    failed |= outcome.failed | dict.fromkeys(missing, "its budget could not be measured")


def _tune(study: Study, found: StageResults, failed: dict[str, str]) -> None:
    """Run the trials of every row and choose the settings with the best validation kNN."""
    found.trials = {label: [] if label in failed else runs for label, runs in study.tuning_runs(found.epochs).items()}
    outcome = _execute([run for trials in found.trials.values() for _, run in trials], study.options, study)
    found.scores = {key: record["numbers"]["knn"] for key, record in outcome.records.items()}
    for label, trials in found.trials.items():
        scores = {i: found.scores[run.key] for i, (_, run) in enumerate(trials) if run.key in found.scores}
        if (best := best_trial([trial for trial, _ in trials], scores)) is not None:
            found.chosen[label] = best
        elif trials:
            failed[label] = "all of its tuning runs failed"


def _execute(runs: list[Run], options: StudyOptions, study: Study) -> Outcome:
    """Execute runs that later ones depend on; raise StopRequested after a stop."""
    outcome = execute(runs, options, study.images)
    if outcome.stopped_by is not None:
        raise StopRequested(outcome.stopped_by)
    return outcome


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
