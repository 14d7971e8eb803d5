"""Estimate how long a study takes, without writing anything."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

from snclr.studies.conditions.budget import measured_seconds
from snclr.studies.options import StudyOptions
from snclr.studies.runner import execute
from snclr.studies.runs import Evaluation, Run
from snclr.studies.study import Study

_TRIAL_STEPS = 5


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


def estimate_study(study: Study) -> StudyEstimate:
    """Estimate the time of a study from its finished runs, or from a few steps of its first run; write nothing.

    With a budget in seconds, rows that are not calibrated yet count with the epochs as given.
    """
    find = study.options.records.find
    calibrated = {run.label: find(run) for run in study.calibration_runs()}
    epochs = study.equal_epochs({label: measured_seconds(r) for label, r in calibrated.items() if r is not None})
    epochs = {row.label: epochs.get(row.label) or study.own_epochs(row) for row in study.rows}
    by_row = study.tuning_runs(epochs)
    tuning = [run for trials in by_row.values() for _, run in trials]
    runs = tuning + study.runs({label: trials[0][0].settings for label, trials in by_row.items() if trials}, epochs)
    records = {run.key: find(run) for run in runs}
    pending = [run for run in runs if records[run.key] is None]
    finished = [(run, r) for run in runs if (r := records[run.key]) and study.images(run)]
    rates = [r["cost"]["seconds"] / study.images(run) for run, r in finished]
    source = "from the finished runs"
    trained = [run for run in pending if study.images(run)]
    if not rates and trained:
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
        record = execute([trial], StudyOptions(out=folder, quiet=True), lambda _: 1).records.get(trial.key)
    return [record["numbers"]["seconds_per_step"] / run.settings["batch_size"]] if record else []
