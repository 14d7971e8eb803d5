"""Run the pending runs of a study, each in its own subprocess; finished runs are not repeated."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snclr.checkpoint.run_dir import RunDir
from snclr.io.atomic import write_atomic
from snclr.reports.text import COMPARED
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.studies.options import StudyOptions
from snclr.studies.runs import Run

_POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """The records of finished runs by key, the reasons of failed runs by title, and the stop signal, if any."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None

    def raise_if_stopped(self) -> None:
        """Raise StopRequested after a stop."""
        if self.stopped_by is not None:
            raise StopRequested(self.stopped_by)


def start_worker(job: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the process of one run; it stops when our end of its standard input closes."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "snclr.studies.worker", str(job)],
            stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={"PYTHONWARNINGS": "ignore", "GOMP_SPINCOUNT": "10000", **os.environ},  # as in cli/main.py
        )  # fmt: skip


def execute(runs: Sequence[Run], options: StudyOptions, images_of: Callable[[Run], int]) -> Outcome:
    """Run every run without a record; `images_of` returns the images a run trains on, for the progress bar."""
    records = {run.key: options.records.find(run) for run in runs}
    outcome = Outcome({key: record for key, record in records.items() if record is not None})
    pending = list({run.key: run for run in runs if records[run.key] is None}.values())  # rows may share a run
    if not pending:
        return outcome
    progress = Progress("runs", sum(map(images_of, pending)), interval=60.0, quiet=options.quiet)
    with StopFlag() as stop, progress:
        progress.print(f"runs to do: {len(pending)}, finished: {len(outcome.records)}")
        _process(pending, options, images_of, outcome, stop, progress)
        outcome.stopped_by = stop.requested
        if stop.requested is not None:
            left = sum(run.key not in outcome.records for run in runs)
            progress.print(f"stopped; runs left: {left}. Run the same command again to continue.")
    return outcome


def _process(
    pending: Sequence[Run], options: StudyOptions, images_of: Callable[[Run], int], outcome: Outcome, stop: StopFlag,
    progress: Progress,
) -> None:  # fmt: skip
    """Keep up to `jobs` processes running until all runs are finished or a stop is requested."""
    queue, running, terminated = deque(pending), list[tuple[Run, Any]](), False
    try:
        while running or (queue and stop.requested is None):
            while queue and stop.requested is None and len(running) < options.jobs:
                run = queue.popleft()
                job = options.side_file(run, "job.json")
                write_atomic(job, json.dumps(options.job(run), indent=1))
                running.append((run, start_worker(job, options.side_file(run, "log"))))
            if stop.requested is not None and not terminated:
                terminated = True
                progress.print("stopping: running runs save a checkpoint first")
                for _, process in running:
                    process.terminate()
            for run, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((run, process))
                if process.stdin is not None:
                    process.stdin.close()
                if (record := options.records.find(run)) is not None:
                    outcome.records[run.key] = record
                    progress.print(f"{run.title}: {_describe(record)}")
                elif stop.requested is None:
                    outcome.failed[run.title] = _failure(options.side_file(run, "log"), process.returncode)
                    progress.print(f"FAILED {run.title}: {outcome.failed[run.title]}")
            trained = {run.title: min(_images(run, options), images_of(run)) for run, _ in running}
            if trained:  # named before its first step, as its start takes long
                progress.values["run"] = ", ".join(trained)
            finished = sum(images_of(run) for run in pending if run.key in outcome.records)
            if (done := finished + sum(trained.values())) > progress.done:
                progress.update(done - progress.done)
            if running:
                time.sleep(_POLL_SECONDS)
    finally:
        for _, process in running:  # after a second Ctrl-C; the last checkpoint remains
            process.kill()
            process.wait()


def _images(run: Run, options: StudyOptions) -> int:
    """Return the images a run has trained on, by the last complete line of its metrics; 0 if there is none."""
    try:
        with RunDir(options.run_dir(run)).metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"]) * int(run.settings["batch_size"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def _failure(log: Path, code: int) -> str:
    """Describe a failed run by the last line of its log, its exit code, and the path of the log."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{last} ({f'killed by signal {-code}' if code < 0 else f'exit code {code}'}; log: {log})"


def _describe(record: dict[str, Any]) -> str:
    """Summarize a finished run in one line."""
    numbers, cost = record["numbers"], record["cost"]
    texts = [f"{name} {numbers[name]:.2%}" for name in COMPARED if name in numbers]
    texts += [f"{seconds:.3f} s per step"] if (seconds := numbers.get("seconds_per_step")) else []
    return ", ".join([*texts, f"{cost['seconds']:,.0f} s", f"{cost['peak_mb']:,.0f} MB"])
