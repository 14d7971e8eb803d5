"""What the trials share: tiny runs, started in a moment, disturbed, and compared with an undisturbed one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from snclr.checkpoint.format import Checkpoint, latest_checkpoint, load_checkpoint
from snclr.train.metrics import read_metrics
from tests.helpers.state_digest import digest
from tests.reliability.zygote import Zygote

BATCHES, EPOCHS, CHECKPOINT_EVERY = 4, 4, 3
STEPS = BATCHES * EPOCHS
SETTINGS: dict[str, Any] = {
    "encoder": "resnet10-tiny", "stem": "half", "image-size": 16, "batch-size": 16, "epochs": EPOCHS,
    "warmup-epochs": 1, "hidden": 32, "dim": 16, "neighbors": 4, "queue-length": 40, "views": "cifar", "log-every": 1,
    "checkpoint-every": CHECKPOINT_EVERY, "lr": 0.1, "accelerator": "cpu", "threads": 1,
}  # fmt: skip
HANG_SECONDS = 290.0
"""Seconds after which a process counts as hung, even on a busy machine."""


def setting_flags(*overrides: str, **settings: Any) -> list[str]:
    """Return the flags of `SETTINGS` and `settings`, each replaced by its override: a flag may be given only once."""
    given = {flag.partition("=")[0] for flag in overrides}
    flags = {f"--{name}": value for name, value in {**SETTINGS, **settings}.items()}
    return [*(f"{name}={value}" for name, value in flags.items() if name not in given), *overrides]


def write_images(folder: Path, count: int = 70) -> Path:
    """Noise in two classes (70: four batches and a rest that is dropped), and one file that is no image."""
    generator = np.random.default_rng(0)
    for i in range(count):
        pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        (folder / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"class{i % 2}" / f"{i}.png")
    (folder / "class0" / "broken.png").write_bytes(b"not an image")
    return folder


@dataclass
class Command:
    """A running `snclr` command; `output` has all it printed."""

    shop: Workshop
    pid: int
    out: Path
    log: Path
    code: int | None = None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def alive(self) -> bool:
        if self.code is None:
            self.code = self.shop.ask({"poll": self.pid})
        return self.code is None

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """The exit code (negative: the signal it died of)."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL, group=True)
                raise AssertionError(f"still running after {seconds:.0f} s:\n{self.output[-2000:]}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def ends_with(self, code: int) -> str:
        """Its output, after it has ended with that code."""
        assert self.wait() == code, f"exit code {self.code} instead of {code}:\n{self.output[-3000:]}"
        return self.output

    def send(self, number: int, *, group: bool = False) -> None:
        """A signal to the process, or to its group with the loader's workers; nothing once it has been reaped."""
        if self.alive():
            (os.killpg if group else os.kill)(self.pid, number)

    def reach(self, step: int) -> int:
        """Wait until that step is in the metrics (or the end); the last step there."""
        deadline, last = time.monotonic() + HANG_SECONDS, 0
        while self.alive() and last < step:
            assert time.monotonic() < deadline, f"step {step} was not reached:\n{self.output[-2000:]}"
            time.sleep(0.005)
            last = last_step(self.out)
        return last


class Workshop:
    """A folder for trials with images, and a zygote that starts commands; `close` ends and removes what was made."""

    def __init__(self, root: Path, *, strict: bool = False) -> None:
        self.root = root
        self.strict = strict
        """Whether limits of time count: they do in a soak on a quiet machine, not in tests on any."""
        root.mkdir(parents=True, exist_ok=True)
        self.images = write_images(root / "images")
        self._numbers = itertools.count()
        self._zygote: Zygote | None = None
        self.kept: dict[str, Path] = {}
        """Runs that several trials look at."""
        self.seconds = 0.0

    def ask(self, order: dict[str, Any]) -> Any:
        """Send the zygote one line and return its answer."""
        self._zygote = self._zygote or Zygote()
        return self._zygote.ask(order)

    def place(self, name: str = "run") -> Path:
        """A new path."""
        return self.root / f"{name}-{next(self._numbers)}"

    def snclr(
        self, *arguments: str | Path, out: Path | None = None, faults: list[dict[str, Any]] | None = None
    ) -> Command:
        """Start a command."""
        log = self.place("output").with_suffix(".txt")
        order = {"run": [str(a) for a in arguments], "output": str(log), "faults": faults or []}
        return Command(self, self.ask(order), out or self.root, log)

    def pretrain(self, out: Path, *flags: str, workers: int = 0, faults: list[dict[str, Any]] | None = None) -> Command:
        """Start the tiny run in `out`; with `--resume` the same flags go on with it."""
        command = setting_flags(*flags, data=self.images, out=out, workers=workers)
        return self.snclr("pretrain", *command, out=out, faults=faults)

    def undisturbed(self) -> Path:
        """The run that nothing happened to; made once. Sets `seconds`, how long it took."""
        if "run" not in self.kept:
            out = self.place("undisturbed")
            self.ask({"poll": self.pretrain(self.place("warm"), "--epochs=2").pid})  # loads what is loaded on first use
            began = time.monotonic()
            self.pretrain(out).ends_with(0)
            self.seconds = time.monotonic() - began
            keys = [json.loads(line)["key"] for line in (out / "skipped.jsonl").read_text().splitlines()]
            assert keys == ["class0/broken.png"], keys
            assert [line["step"] for line in read_metrics(out)] == list(range(1, STEPS + 1))
            self.kept["run"] = out
        return self.kept["run"]

    def interrupted(self) -> Path:
        """A run that was killed after its fourth checkpoint: a copy for each caller, to damage at will."""
        if "killed" not in self.kept:
            out = self.place("interrupted")
            fault = {"name": "kill_at", "point": "before fsync", "nth": 5}
            assert self.pretrain(out, "--keep-checkpoints=3", faults=[fault]).wait() == -signal.SIGKILL
            self.kept["killed"] = out
        return shutil.copytree(self.kept["killed"], self.place("copy"))

    def close(self) -> None:
        """End the zygote and delete everything."""
        if self._zygote is not None:
            self._zygote.close(HANG_SECONDS)
        shutil.rmtree(self.root, ignore_errors=True)


def last_step(out: Path) -> int:
    """The last step in a run's metrics, 0 before the first."""
    lines = read_metrics(out)
    return lines[-1]["step"] if lines else 0


def newest(out: Path) -> Checkpoint | None:
    """A run's newest checkpoint, none of them damaged."""

    def warn(text: str) -> None:
        raise AssertionError(text)

    return latest_checkpoint(out / "checkpoints", warn)


def assert_lost_little(out: Path) -> None:
    """What a run has done and not saved is at most one checkpoint interval, and all it has saved is whole."""
    folder = out / "checkpoints"
    steps = [load_checkpoint(path).step for path in sorted(folder.glob("step-*"))] if folder.is_dir() else []
    kept = newest(out)
    assert (kept.step if kept else 0) == max(steps, default=0), steps
    assert last_step(out) - (kept.step if kept else 0) <= CHECKPOINT_EVERY, (last_step(out), steps)


def assert_same_end(out: Path, undisturbed: Path) -> None:
    """The same state to the last bit, the same metrics but for clocks, the same encoder and bad images."""
    ends = [newest(path) for path in (out, undisturbed)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step
    assert ends[0].info == ends[1].info
    assert digest(ends[0].tensors, ends[0].step) == digest(ends[1].tensors, ends[1].step)
    lines = [[{k: v for k, v in line.items() if k != "timing"} for line in read_metrics(p)] for p in (out, undisturbed)]
    assert lines[0] == lines[1]
    for name in ("encoder.safetensors", "skipped.jsonl"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes(), name
    rubbish = [path for path in out.rglob("*") if path.name.endswith((".partial", ".new"))]
    assert not rubbish, rubbish
