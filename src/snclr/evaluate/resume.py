"""Long evaluations that are stopped and go on: the stop all processes agree on, and what is kept between two calls."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from snclr.distributed import broadcast_object, fail_together, gather_objects, rank_and_size, together
from snclr.durable import FileLock, discard, lock_folder, sweep
from snclr.errors import UserError
from snclr.train.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from snclr.train.signals import StopRequest

EVALUATION = "evaluation"
"""The folder in a run for what evaluations keep: features, and the state of interrupted ones. It may be deleted."""
SAVE_SECONDS = 120.0
"""Time between two states: what a kill can cost."""


class Interrupted(Exception):
    """A stop was asked for, on this process or another; the same call goes on with what was kept."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def stop_together(stop: StopRequest | None) -> None:
    """Raise Interrupted on every process when any was asked to stop (each must call this)."""
    asked = gather_objects(None if stop is None else stop.requested)
    for number in asked:
        if number is not None:
            raise Interrupted(number)


def load_together(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint of a folder as process 0 sees it, on every process; None where there is none."""
    found: Checkpoint | None = None
    failure: UserError | None = None
    if rank_and_size()[0] == 0:
        try:
            found = latest_checkpoint(folder, say)
        except UserError as error:
            failure = error
    fail_together(failure)
    return broadcast_object(found)


def short_hash(identity: dict[str, Any]) -> str:
    """A name for JSON values, for folders.

    >>> short_hash({"seed": 0, "epochs": 90}) == short_hash({"epochs": 90, "seed": 0})
    True
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class Kept:
    """The state of one evaluation in a folder of its own, for as long as it is not done; a block locks it.

    `identity` are JSON values that decide the outcome: another evaluation has another folder. Process 0 reads and
    writes, and sends what it read to the others.
    """

    parent: Path
    name: str
    identity: dict[str, Any]
    _last: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.identity = json.loads(json.dumps(self.identity))  # as it will be read back
        self.folder = self.parent / f"{self.name}-{short_hash(self.identity)}"
        self._lock = FileLock(self.folder / ".lock")

    def __enter__(self) -> Kept:
        with together():
            if rank_and_size()[0] == 0:
                lock_folder(self._lock, "the same evaluation", "copy the run to a place you own")
                sweep(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if rank_and_size()[0] == 0 and (kind is None or not any(path.is_dir() for path in self.folder.iterdir())):
            discard(self.folder)  # done, or nothing done: nothing is left to go on with
        self._lock.release()

    def load(self, stage: str, say: Callable[[str], None]) -> Checkpoint | None:
        """The state of a stage, on every process, or None."""
        found = load_together(self.folder / stage, say)
        if found is not None and found.info.get("identity") != self.identity:
            say(f"{found.path} is of another evaluation and is not used")
            found = None
        self._last = time.monotonic()
        return found

    @property
    def due(self) -> bool:
        """Whether it is time to save, by this process's clock."""
        return time.monotonic() - self._last >= SAVE_SECONDS

    def save(self, stage: str, step: int, tensors: dict[str, Tensor], info: dict[str, Any] | None = None) -> None:
        """Keep the state of a stage after so many steps (process 0; on the others nothing happens)."""
        if rank_and_size()[0] == 0:
            content = {**(info or {}), "identity": self.identity}
            save_checkpoint(self.folder / stage, tensors, content, step=step, keep=1)
        self._last = time.monotonic()
