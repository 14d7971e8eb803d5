"""Run the pending runs of a study, each in its own subprocess; finished runs are not repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snclr.benchmark.plan import Run, data_name
from snclr.benchmark.records import Records
from snclr.checkpoint.run_dir import RunDir
from snclr.io.atomic import write_atomic
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Workspace:
    """Where runs and records are written, and how many runs are parallel."""

    out: Path
    records: Records
    jobs: int = 1
    keep_runs: bool = False
    quiet: bool = False

    def run_dir(self, run: Run) -> Path:
        """Return the run directory, as `snclr pretrain` writes it."""
        return self.out / "runs" / run.folder

    def side_file(self, run: Run, suffix: str) -> Path:
        """Return the path of a file about a run, next to its run directory."""
        return self.out / "runs" / f"{Path(run.record).stem}.{suffix}"


@dataclass
class Outcome:
    """The records of finished runs by key, the reasons of failed runs by title, and the stop signal, if any."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None


def start_worker(job: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the process of one run; it stops when our end of its standard input closes."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "snclr.benchmark.worker", str(job)],
            stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")},
        )  # fmt: skip


def execute(runs: Sequence[Run], workspace: Workspace, images_of: Callable[[Run], int]) -> Outcome:
    """Run every run without a record; `images_of` returns the images a run trains on, for the progress bar."""
    records = {run.key: workspace.records.find(run) for run in runs}
    outcome = Outcome({key: record for key, record in records.items() if record is not None})
    pending = list({run.key: run for run in runs if records[run.key] is None}.values())  # rows may share a run
    if not pending:
        return outcome
    progress = Progress("runs", sum(map(images_of, pending)), interval=60.0, quiet=workspace.quiet)
    with StopFlag() as stop, progress:
        progress.say(f"{len(pending)} runs to do, {len(outcome.records)} finished")
        _Pool(workspace, progress, images_of, outcome, stop).process(pending)
        outcome.stopped_by = stop.requested
        if stop.requested is not None:
            left = sum(run.key not in outcome.records for run in runs)
            progress.say(f"stopped; {left} runs are not finished. Run the same command again to continue.")
    return outcome


@dataclass
class _Pool:
    """The running subprocesses."""

    workspace: Workspace
    progress: Progress
    images_of: Callable[[Run], int]
    outcome: Outcome
    stop: StopFlag
    running: list[tuple[Run, Any]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    def process(self, pending: list[Run]) -> None:
        """Keep up to `jobs` processes running until all runs are finished or a stop is requested."""
        queue, terminated = deque(pending), False
        try:
            while self.running or (queue and self.stop.requested is None):
                while queue and self.stop.requested is None and len(self.running) < self.workspace.jobs:
                    self._start(queue.popleft())
                if self.stop.requested is not None and not terminated:
                    terminated = True
                    self.progress.say("stopping: running runs save a checkpoint first")
                    for _, process in self.running:
                        process.terminate()
                for run, process in list(self.running):
                    if process.poll() is not None:
                        self.running.remove((run, process))
                        self._finish(run, process)
                    else:
                        self._update(run)
                if self.running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for _, process in self.running:  # after a second Ctrl-C; the last checkpoint remains
                process.kill()
                process.wait()

    def _start(self, run: Run) -> None:
        workspace = self.workspace
        job = workspace.side_file(run, "job.json")
        job.parent.mkdir(parents=True, exist_ok=True)
        folder = str(workspace.run_dir(run))
        content = {
            "key": run.key, "label": run.label, "given": run.given, "settings": run.settings,
            "data": {"name": data_name(run.given["data"]), "fingerprint": run.data},
            "evaluation": asdict(run.evaluation), "folder": folder, "attempts": f"{folder}.attempts.jsonl",
            "record": str(workspace.records.path(run)), "keep_runs": workspace.keep_runs, "jobs": workspace.jobs,
        }  # fmt: skip
        write_atomic(job, json.dumps(content, indent=1))
        self.running.append((run, start_worker(job, workspace.side_file(run, "log"))))

    def _finish(self, run: Run, process: Any) -> None:
        if process.stdin is not None:
            process.stdin.close()
        record = self.workspace.records.find(run)
        if record is None:
            if self.stop.requested is None:
                reason = _failure(self.workspace.side_file(run, "log"), process.returncode)
                self.outcome.failed[run.title] = reason
                self.progress.say(f"FAILED {run.title}: {reason}")
            return
        self.outcome.records[run.key] = record
        self._update(run, finished=True)
        self.progress.say(f"{run.title}: {_describe(record)}")

    def _update(self, run: Run, *, finished: bool = False) -> None:
        """Advance the progress bar by the images a run trained on since the last update."""
        total = images = self.images_of(run)
        if not finished:
            images = min(total, _last_step(self.workspace.run_dir(run)) * int(run.settings["batch_size"]))
        new = images - self.counted.get(run.key, 0)
        if new > 0:
            self.counted[run.key] = images
            self.progress.update(new, values={"run": f"{run.title} {images / max(total, 1):.0%}"})


def _last_step(folder: Path) -> int:
    """Return the step of the last complete line of a run's metrics, 0 if there is none."""
    try:
        with RunDir(folder).metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
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
    texts = [f"{name} {numbers[name]:.2%}" for name in ("knn", "linear") if name in numbers]
    texts += [f"{seconds:.3f} s per step"] if (seconds := numbers.get("seconds_per_step")) else []
    return ", ".join([*texts, f"{cost['seconds']:,.0f} s", f"{cost['peak_mb']:,.0f} MB"])
