"""Runs the pending runs, each in its own process, a few side by side; what is finished is never repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snclr.comparison.plan import Run, data_name
from snclr.comparison.store import Records
from snclr.durable import write_atomic
from snclr.progress import Progress
from snclr.train.run_folder import RunFolder
from snclr.train.signals import StopRequest

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """Where runs and records go, and how many run at once."""

    out: Path
    records: Records
    jobs: int = 1
    keep_runs: bool = False
    quiet: bool = False

    def folder(self, run: Run) -> Path:
        """The run's own folder, as `snclr pretrain` writes it."""
        return self.out / "runs" / run.folder

    def beside(self, run: Run, ending: str) -> Path:
        """A file about the run, beside its folder (the folder itself is pretrain's)."""
        return self.out / "runs" / f"{Path(run.record).stem}.{ending}"


@dataclass
class Outcome:
    """What became of a list of runs: `records` by key, why some failed by title, and the exit code of a stop."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: int = 0

    @property
    def exit_code(self) -> int:
        """130 or 143 for a stop, 1 where runs failed, else 0."""
        return self.stopped or (1 if self.failed else 0)


def start_worker(job: Path, log: Path) -> subprocess.Popen[bytes]:
    """The process of one run. Its standard input stays open as long as we live: when that closes, it stops."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "snclr.comparison.worker", str(job)],
            stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True,  # a Ctrl-C reaches it through us, once
            env={**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")},
        )  # fmt: skip


def execute(runs: Sequence[Run], place: Place, images_of: Callable[[Run], int]) -> Outcome:
    """Make every run that has no record yet; `images_of` gives the images a run trains on in all, for the progress."""
    outcome = Outcome()
    waiting: list[Run] = []  # no run twice, though two rows may be the same one
    for run in runs:
        if (record := place.records.find(run)) is not None:
            outcome.records[run.key] = record
        elif all(other.key != run.key for other in waiting):
            waiting.append(run)
    total = sum(images_of(run) for run in waiting)
    progress = Progress("runs", total, interval=60.0, quiet=place.quiet)
    with StopRequest() as stop, progress:
        if waiting:
            progress.say(f"{len(waiting)} runs to make, {len(outcome.records)} already finished")
        _Pool(place, progress, images_of, outcome).drain(waiting, stop)
        outcome.stopped = stop.exit_code
        if outcome.stopped:
            left = sum(place.records.find(run) is None for run in runs)
            progress.say(f"stopped; {left} runs are not finished. The same command goes on from here.")
    return outcome


@dataclass
class _Pool:
    """The processes that are running now."""

    place: Place
    progress: Progress
    images_of: Callable[[Run], int]
    outcome: Outcome
    running: list[tuple[Run, Any]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    def drain(self, waiting: list[Run], stop: StopRequest) -> None:
        """Keep up to `jobs` processes busy until all is done or a stop is asked for."""
        number = len(waiting)
        told = False
        try:
            while self.running or (waiting and stop.requested is None):
                while waiting and stop.requested is None and len(self.running) < self.place.jobs:
                    self._begin(waiting.pop(0))
                if stop.requested is not None and not told:
                    told = True
                    self.progress.say("stopping: the running run saves its state first")
                    for _, process in self.running:
                        process.terminate()
                for run, process in list(self.running):
                    if process.poll() is not None:
                        self.running.remove((run, process))
                        self._end(run, process, number, stop)
                    else:
                        self._count(run)
                if self.running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for _, process in self.running:  # a second Ctrl-C: the last checkpoint is what remains
                process.kill()
                process.wait()

    def _begin(self, run: Run) -> None:
        job, log = self.place.beside(run, "job.json"), self.place.beside(run, "log")
        job.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "key": run.key,
            "label": run.label,
            "given": run.given,
            "settings": run.settings,
            "data": {"name": data_name(run.given["data"]), "fingerprint": run.data},
            "evaluation": asdict(run.evaluation),
            "folder": str(self.place.folder(run)),
            "attempts": str(self.place.folder(run)) + ".attempts.jsonl",
            "record": str(self.place.records.path(run)),
            "keep_runs": self.place.keep_runs,
            "jobs": self.place.jobs,
        }
        write_atomic(job, json.dumps(content, indent=1))
        self.running.append((run, start_worker(job, log)))

    def _end(self, run: Run, process: Any, number: int, stop: StopRequest) -> None:
        if process.stdin is not None:
            process.stdin.close()
        record = self.place.records.find(run)
        if record is None:
            if stop.requested is None:
                reason = _last_words(self.place.beside(run, "log"), process.returncode)
                self.outcome.failed[run.title] = reason
                self.progress.say(f"FAILED {run.title}: {reason}")
            return
        self.outcome.records[run.key] = record
        self._count(run, done=True)
        place = len(self.outcome.records) + len(self.outcome.failed)
        self.progress.say(f"[{place}/{max(number, place)}] {run.title}: {_short(record)}")

    def _count(self, run: Run, *, done: bool = False) -> None:
        """Tell the progress how many images more a run has trained on since it was last asked."""
        images = self.images_of(run)
        if not done:
            images = min(images, _last_step(self.place.folder(run)) * int(run.settings["batch_size"]))
        new = images - self.counted.get(run.key, 0)
        if new > 0:
            self.counted[run.key] = images
            share = images / max(self.images_of(run), 1)
            self.progress.update(new, values={"run": f"{run.title} {share:.0%}"})


def _last_step(folder: Path) -> int:
    """The step of the last whole line of a run's metrics; 0 before there is one."""
    try:
        with RunFolder(folder).metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def _last_words(log: Path, code: int) -> str:
    """The last line a failed process wrote, and where the rest is."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{lines[-1].strip() if lines else 'it said nothing'} ({ending}; all it said is in {log})"


def _short(record: dict[str, Any]) -> str:
    """A finished run in one line."""
    names = {"knn": "kNN", "linear": "linear"}
    numbers = [f"{names[n]} {v:.2%}" for n, v in record["numbers"].items() if n in names]
    if "seconds_per_step" in record["numbers"]:
        numbers = [f"{record['numbers']['seconds_per_step']:.3f} s a step"]
    return ", ".join([*numbers, f"{record['cost']['seconds']:,.0f} s", f"{record['cost']['peak_mb']:,.0f} MB"])
