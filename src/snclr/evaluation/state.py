"""Stops that all ranks agree on, and the saved state of long evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from snclr.checkpoint.format import Checkpoint, save_checkpoint
from snclr.distributed.collectives import all_gather_objects, raise_on_all_ranks, rank_and_size
from snclr.io.atomic import discard, remove_leftovers
from snclr.io.hashing import sha256_json
from snclr.io.locking import FileLock, lock_folder
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.trainer import Trainer, TrainTask, load_latest_checkpoint

EVALUATION = "evaluation"
"""Directory in a run for cached features and the state of stopped evaluations.

It may be deleted when no evaluation is running.
"""


def requested_stop(stop: StopFlag | None) -> int | None:
    """Return the stop signal that any rank received, or None; every rank must call this."""
    signals = all_gather_objects(None if stop is None else stop.requested)
    return next((signum for signum in signals if signum is not None), None)


def raise_if_stop_requested(stop: StopFlag | None) -> None:
    """Raise StopRequested on every rank if any rank received a stop signal; every rank must call this."""
    if (signum := requested_stop(stop)) is not None:
        raise StopRequested(signum)


def short_hash(identity: dict[str, Any]) -> str:
    """Return 12 hex digits that identify JSON values, for directory names.

    >>> short_hash({"seed": 0, "epochs": 90}) == short_hash({"epochs": 90, "seed": 0})
    True
    """
    return sha256_json(identity)[:12]


@dataclass
class EvalState:
    """The saved state of one unfinished evaluation; locked inside a `with` block and deleted on success.

    `identity` are the JSON values that determine the result: each has a directory of its own. Rank 0 reads and writes;
    the other ranks receive what it read.
    """

    parent: Path
    name: str
    identity: dict[str, Any]
    keep: bool = False
    """Whether the folder is kept, with other files of the caller."""

    def __post_init__(self) -> None:
        self.identity = json.loads(json.dumps(self.identity))  # tuples become lists, as in the saved state
        self.folder = self.parent / f"{self.name}-{short_hash(self.identity)}"
        self._lock = FileLock(self.folder / ".lock")

    def __enter__(self) -> EvalState:
        with raise_on_all_ranks():
            if rank_and_size()[0] == 0:
                lock_folder(self._lock, "the same evaluation", "copy the run to a directory you own")
                remove_leftovers(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_empty = kind is None or not any(path.is_dir() for path in self.folder.iterdir())
        if rank_and_size()[0] == 0 and not self.keep and is_empty:
            discard(self.folder)  # finished, or nothing was saved
        self._lock.release()

    def load(self, stage: str, device: torch.device | str, *, quiet: bool) -> Checkpoint | None:
        """Return the saved state of a stage on every rank, or None."""
        return load_latest_checkpoint(self.folder / stage, device, self.identity, quiet=quiet)

    def save(self, stage: str, step: int, tensors: dict[str, Tensor]) -> None:
        """Save the state of a stage after `step` steps, on rank 0."""
        if rank_and_size()[0] == 0:
            save_checkpoint(self.folder / stage, tensors, {"identity": self.identity}, step=step, keep=1)


def fit_task(
    task: TrainTask[Any], state: EvalState | None, stage: str, *, stop: StopFlag | None, device: torch.device | str,
    quiet: bool, **options: Any,
) -> None:  # fmt: skip
    """Train a task to its last step; with `state`, save and resume in its sub-folder `stage`.

    `options` are further fields of `Trainer`.
    """
    folder, identity, checkpoint = None, None, None
    quiet = quiet or rank_and_size()[0] > 0
    if state is not None:
        folder, identity, checkpoint = state.folder / stage, state.identity, state.load(stage, device, quiet=quiet)
    trainer = Trainer(task=task, checkpoints=folder, stop=stop or StopFlag(), identity=identity, quiet=quiet, **options)
    trainer.fit(checkpoint)
