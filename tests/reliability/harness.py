"""Shared code of the trials: start a tiny run, interrupt it, and compare the result with a reference run."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snclr.checkpoint.format import Checkpoint, latest_checkpoint, load_checkpoint
from snclr.train.metrics import read_metrics
from tests.helpers.noise_images import write_noise
from tests.helpers.state_digest import digest
from tests.reliability.fork_server import ForkedProcess, shared_fork_server

BATCHES, EPOCHS, CHECKPOINT_EVERY = 4, 4, 3
STEPS = BATCHES * EPOCHS
SETTINGS: dict[str, Any] = {
    "encoder": "resnet10-tiny", "stem": "half", "image-size": 16, "batch-size": 16, "epochs": EPOCHS,
    "warmup-epochs": 1, "hidden": 32, "dim": 16, "neighbors": 4, "queue-length": 40, "views": "cifar", "log-every": 1,
    "checkpoint-every": CHECKPOINT_EVERY, "lr": 0.1, "device": "cpu", "threads": 1,
}  # fmt: skip
HANG_SECONDS = 290.0
"""Seconds after which a process counts as hung, even on a busy machine."""


def setting_flags(*overrides: str, **settings: Any) -> list[str]:
    """Return the flags of `SETTINGS` and `settings`, each replaced by its override: a flag may be given only once."""
    given = {flag.partition("=")[0] for flag in overrides}
    flags = {f"--{name}": value for name, value in {**SETTINGS, **settings}.items()}
    return [*(f"{name}={value}" for name, value in flags.items() if name not in given), *overrides]


def write_images(folder: Path, count: int = 70) -> Path:
    """Write noise images in two classes (70: four batches and an incomplete one) and a file that is no image."""
    write_noise(folder, count, size=(20, 24))
    (folder / "class0" / "broken.png").write_bytes(b"not an image")
    return folder


@dataclass
class Command:
    """A running `snclr` command; `output` is everything it has printed."""

    process: ForkedProcess
    out: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Wait for the end and return the exit code (negative: the signal that ended it)."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL, group=True)
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.output[-2000:]}") from None

    def expect_exit(self, code: int) -> str:
        """Wait for the end, check the exit code and return the output."""
        assert self.wait() == code, f"exit code {self.process.returncode} instead of {code}:\n{self.output[-3000:]}"
        return self.output

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to its group with the dataloader workers, if it still runs."""
        self.process.send_signal(number, group=group)

    def wait_for_step(self, step: int) -> int:
        """Wait until that step is in the metrics or the command has ended; return the last step."""
        deadline, last = time.monotonic() + HANG_SECONDS, 0
        while self.alive() and last < step:
            assert time.monotonic() < deadline, f"step {step} was not reached:\n{self.output[-2000:]}"
            time.sleep(0.005)
            last = last_step(self.out)
        return last


class Sandbox:
    """A folder with images and cached runs, and commands started in it; `close` deletes the folder."""

    def __init__(self, root: Path, *, check_time_limits: bool = False) -> None:
        self.root = root
        self.check_time_limits = check_time_limits
        """Whether exceeded time limits are failures: in the soak on an idle machine, never in `make test`."""
        root.mkdir(parents=True, exist_ok=True)
        self.images = write_images(root / "images")
        self._numbers = itertools.count()
        self.cached_runs: dict[str, Path] = {}
        """Runs that several trials use, by name."""
        self.seconds = 0.0

    def new_path(self, name: str = "run") -> Path:
        """Return a new path in the folder."""
        return self.root / f"{name}-{next(self._numbers)}"

    def snclr(
        self, *arguments: str | Path, out: Path | None = None, faults: list[dict[str, Any]] | None = None
    ) -> Command:
        """Start a command."""
        log = self.new_path("output").with_suffix(".txt")
        process = shared_fork_server().start([str(a) for a in arguments], output=str(log), faults=faults or [])
        return Command(process, out or self.root, log)

    def pretrain(self, out: Path, *flags: str, workers: int = 0, faults: list[dict[str, Any]] | None = None) -> Command:
        """Start the tiny run in `out`."""
        command = setting_flags(*flags, data=self.images, out=out, workers=workers)
        return self.snclr("pretrain", *command, out=out, faults=faults)

    def reference_run(self) -> Path:
        """Return an uninterrupted run, made once. Sets `seconds`, its duration."""
        if "run" not in self.cached_runs:
            out = self.new_path("reference")
            began = time.monotonic()
            self.pretrain(out).expect_exit(0)
            self.seconds = time.monotonic() - began
            keys = [json.loads(line)["key"] for line in (out / "skipped.jsonl").read_text().splitlines()]
            assert keys == ["class0/broken.png"], keys
            assert [line["step"] for line in read_metrics(out)] == list(range(1, STEPS + 1))
            self.cached_runs["run"] = out
        return self.cached_runs["run"]

    def killed_run(self) -> Path:
        """Return a copy of a run that was killed after its fourth checkpoint."""
        if "killed" not in self.cached_runs:
            out = self.new_path("interrupted")
            fault = {"name": "kill_at", "point": "before fsync", "nth": 5}
            assert self.pretrain(out, "--keep-checkpoints=3", faults=[fault]).wait() == -signal.SIGKILL
            self.cached_runs["killed"] = out
        return shutil.copytree(self.cached_runs["killed"], self.new_path("copy"))

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.root, ignore_errors=True)


def last_step(out: Path) -> int:
    """Return the last step in the metrics of a run, or 0."""
    lines = read_metrics(out)
    return lines[-1]["step"] if lines else 0


def newest_checkpoint(out: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run; a damaged one is a failure."""

    def warn(text: str) -> None:
        raise AssertionError(text)

    return latest_checkpoint(out / "checkpoints", warn)


def assert_one_interval_lost_at_most(out: Path) -> None:
    """Check that at most one checkpoint interval is lost and that all checkpoints are intact."""
    folder = out / "checkpoints"
    steps = [load_checkpoint(path).step for path in sorted(folder.glob("step-*"))] if folder.is_dir() else []
    kept = newest_checkpoint(out)
    assert (kept.step if kept else 0) == max(steps, default=0), steps
    assert last_step(out) - (kept.step if kept else 0) <= CHECKPOINT_EVERY, (last_step(out), steps)


def assert_same_result(out: Path, reference: Path) -> None:
    """Check for bit-identical state, encoder and bad images, equal metrics except timings, and no temporary files."""
    ends = [newest_checkpoint(path) for path in (out, reference)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step
    assert ends[0].info == ends[1].info
    assert digest(ends[0].tensors, ends[0].step) == digest(ends[1].tensors, ends[1].step)
    lines = [[{k: v for k, v in line.items() if k != "timing"} for line in read_metrics(p)] for p in (out, reference)]
    assert lines[0] == lines[1]
    for name in ("encoder.safetensors", "skipped.jsonl"):
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name
    leftovers = [path for path in out.rglob("*") if path.name.endswith((".partial", ".new"))]
    assert not leftovers, leftovers
