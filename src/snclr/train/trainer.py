"""One training loop for pre-training, fine-tuning, the linear probe and detection.

The trainer handles stop signals, checkpoints, agreement between ranks, progress and metrics. A task provides the
batches, the step and the state to save.
"""

import json
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from snclr.checkpoint.format import Checkpoint, latest_checkpoint, save_checkpoint
from snclr.checkpoint.state import collect_state, restore_state
from snclr.data.loader import Batch, Skip, ViewLoader
from snclr.distributed.collectives import (
    all_gather_ints,
    all_gather_objects,
    all_reduce_sum,
    barrier,
    broadcast_object,
    broadcast_tensors,
    long_barrier,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
    rank_and_size,
)
from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.runtime.progress import Progress, print_wrapped
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.metrics import MetricsLog

SAVE_SECONDS = 120.0
"""Seconds between checkpoints of a task that is not saved every N steps."""
BatchT = TypeVar("BatchT")
_log = logging.getLogger("snclr")


class TrainTask(ABC, Generic[BatchT]):
    """What is trained: the batches of each step, one update, and the state to checkpoint."""

    total_steps: int
    steps_per_epoch: int
    progress: Progress
    """Set by the trainer before it requests the first batch."""

    @abstractmethod
    def images_after(self, step: int) -> int:
        """Return how many images, over all ranks and epochs, the first `step` steps use."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[BatchT]:
        """Yield this rank's batches of the steps from `start` on."""

    @abstractmethod
    def step(self, batch: BatchT, *, log: bool) -> dict[str, Any]:
        """Update the weights once. Return the values to log, or {} if `log` is False."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything a resumed training needs: tensors and JSON values."""

    @abstractmethod
    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore what `state` returned."""

    def display(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values to show beside the progress bar."""
        return values

    def epoch_means(self) -> Mapping[str, Any]:
        """Return means over the epoch's steps, which replace values of its last step in the line of the epoch."""
        return {}

    def new_skips(self) -> list[Any]:
        """Return the unreadable images this rank found since the last `merge_skips`."""
        return []

    def merge_skips(self, parts: list[list[Any]]) -> None:
        """Add the `new_skips` of every rank, in rank order."""

    def on_epoch(self, step: int, metrics: MetricsLog) -> None:
        """Add to the metrics after an epoch (rank 0)."""

    def on_save(self, step: int) -> None:
        """Write files that go with the checkpoint of a step (rank 0)."""


class LoaderTask(TrainTask[Batch]):
    """A task that trains a module on the batches of a `ViewLoader`, with their unreadable images."""

    loader: ViewLoader
    module: nn.Module
    """The trained module, without the wrapper of Fabric."""
    optimizer: Any
    """A torch optimizer, or one wrapped by Fabric."""

    def images_after(self, step: int) -> int:
        """Return the images used by the first `step` steps."""
        return step * self.loader.batch_size

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield this rank's batches from step `start` on."""
        return self.loader.batches(start, self.total_steps)

    def new_skips(self) -> list[Skip]:
        """Return the unreadable images that only this rank has found."""
        return self.loader.new_skips()

    def merge_skips(self, parts: list[list[Skip]]) -> None:
        """Add the unreadable images of all ranks."""
        self.loader.merge_skips(parts)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return module, optimizer and the list of unreadable images."""
        tensors = collect_state(self.module, getattr(self.optimizer, "optimizer", self.optimizer))
        return tensors, {"skipped": [asdict(skip) for skip in self.loader.skipped]}

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore what `state` returned."""
        restore_state(checkpoint.tensors, self.module, getattr(self.optimizer, "optimizer", self.optimizer))
        self.loader.restore_skipped([Skip(**entry) for entry in checkpoint.info["skipped"]])


@dataclass(kw_only=True)
class Trainer(Generic[BatchT]):
    """Run a task from a checkpoint to its last step.

    A stop signal on any rank saves a checkpoint and raises StopRequested on all of them.
    """

    task: TrainTask[BatchT]
    description: str
    """Title of the progress bar."""
    checkpoints: Path | None
    """Folder of the checkpoints; None: save none."""
    stop: StopFlag
    start_message: str = ""
    """Printed before the first step."""
    identity: dict[str, Any] | None = None
    """JSON values stored in each checkpoint. They must match to resume from it; see `load_latest_checkpoint`."""
    quiet: bool = False
    metrics: MetricsLog | None = None
    log_every: int = 1
    save_every: int | None = None
    """Steps between checkpoints; None: `SAVE_SECONDS` between them."""
    keep: int = 1
    """Number of checkpoints to keep."""
    epoch_lines: bool = False
    """Log one line per epoch, and print about twenty of them per run."""
    _saved: int = field(default=0, init=False)
    _saved_at: float = field(default_factory=time.monotonic, init=False)

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train from `checkpoint`, or from the start, to the last step."""
        task, total, start = self.task, self.task.total_steps, 0
        if checkpoint is not None:
            task.load_state(checkpoint)
            start = checkpoint.step
        images, initial = task.images_after(total), task.images_after(start)
        with Progress(self.description, images, done=initial, quiet=self.quiet) as task.progress:
            if self.start_message:
                task.progress.print(self.start_message)
            if start:
                done = "; the run is complete" if start == total else ""
                task.progress.print(f"resuming after step {start} of {total}{done}")
            step = self._saved = start
            batches = task.batches(start)
            while step < total:
                fetch_start = time.perf_counter()
                batch = self._next_batch(batches, step, first=step == start)
                if batch is None:
                    break
                fetch_end = time.perf_counter()
                step += 1
                epoch_ends = self.epoch_lines and step % task.steps_per_epoch == 0
                values = task.step(batch, log=step % self.log_every == 0 or step == total or epoch_ends)
                self._report(step, values, fetch_end - fetch_start, time.perf_counter() - fetch_end)
                if self.metrics is not None and step % task.steps_per_epoch == 0:
                    task.on_epoch(step, self.metrics)
                if self.save_every is not None and step % self.save_every == 0:
                    self._save(step)
            del batches  # end the data workers before the last checkpoint is written
            self._save(step)
            if step < total:
                assert self.stop.requested is not None
                raise StopRequested(self.stop.requested, step, total)

    def _next_batch(self, batches: Iterator[BatchT], step: int, *, first: bool) -> BatchT | None:
        """Fetch the next batch and agree with the other ranks, by one all_gather.

        Return None if a stop signal reached any rank. Raise an error of one rank on all ranks. Save if rank 0 finds a
        checkpoint due by time. The first batch may take long, while shards are downloaded.
        """
        batch, error = None, None
        try:
            # On several ranks always: `next` may communicate, and the others may not have got the signal yet.
            if rank_and_size()[1] > 1 or self.stop.requested is None:
                batch = next(batches, None)
        except StopRequested as request:
            self.stop.request(request.signal)
        except Exception as caught:
            error = caught
        if first:
            long_barrier()
        new_skips = self.task.new_skips()
        save_due = self.save_every is None and time.monotonic() - self._saved_at >= SAVE_SECONDS
        local_status = [int(self.stop.requested or 0), int(error is not None), len(new_skips), int(save_due)]
        statuses = all_gather_ints(local_status)  # of every rank
        signal, any_failed, max_new_skips, _ = (max(values) for values in zip(*statuses, strict=True))
        rank_0_saves = bool(statuses[0][3])  # clocks differ between ranks
        if any_failed:
            raise_error_on_all_ranks(error)
        if max_new_skips:
            self.task.merge_skips(all_gather_objects(new_skips))
        if rank_0_saves:
            self._save(step)
        if signal:
            self.stop.request(signal)
            return None
        return batch

    def _report(self, step: int, values: dict[str, Any], wait: float, compute: float) -> None:
        task, progress = self.task, self.task.progress
        if (images := task.images_after(step) - progress.done) > 0:
            progress.update(images, wait, compute, task.display(step, values))
        else:  # the batches have reported their images themselves
            progress.values.update(task.display(step, values))
        if values and self.metrics is not None:
            timing = {"images_per_second": progress.rate, "data_wait_share": progress.wait_share}
            self.metrics.write(step, step / task.steps_per_epoch, values, timing=timing)
        epoch, rest = divmod(step, task.steps_per_epoch)
        if self.epoch_lines and rest == 0:
            epochs = task.total_steps // task.steps_per_epoch
            shown = {**task.display(step, values), **task.epoch_means()}
            line = f"epoch {epoch}/{epochs}: " + ", ".join(f"{k} {v}" for k, v in shown.items() if k != "epoch")
            _log.info(line)
            if epoch % -(-epochs // 20) == 0:
                progress.print(line)

    def _save(self, step: int) -> None:
        """Write a checkpoint, after the metrics it includes are on disk."""
        if self.checkpoints is None or step == self._saved:
            return
        if self.metrics is not None:
            self.metrics.sync()
        with raise_on_all_ranks():
            if rank_and_size()[0] == 0:
                tensors, info = self.task.state()
                if self.identity is not None:
                    info["identity"] = self.identity
                save_checkpoint(self.checkpoints, tensors, info, step=step, keep=self.keep)
                self.task.on_save(step)
        self._saved, self._saved_at = step, time.monotonic()


def load_latest_checkpoint(
    folder: Path, device: torch.device | str, identity: dict[str, Any] | None = None, *, quiet: bool = False
) -> Checkpoint | None:
    """Read the newest intact checkpoint on rank 0 and broadcast it, so that the ranks need no shared disk.

    Refuse a checkpoint whose identity is not `identity`. Damaged checkpoints are skipped with a warning.
    """

    def warn(text: str) -> None:
        log_warning(text)
        if not quiet:
            print_wrapped(f"warning: {text}", sys.stderr)

    found: Checkpoint | None = None
    with raise_on_all_ranks():
        if rank_and_size()[0] == 0:
            found = latest_checkpoint(folder, warn)
            if found is not None and identity is not None and found.info.get("identity") != identity:
                raise UserError(f"{found.path} belongs to a training with other settings or data; delete {folder}")
    shared = broadcast_object(found and replace(found, tensors={}))
    if shared is None:
        return None
    return replace(shared, tensors=broadcast_tensors(None if found is None else found.tensors, torch.device(device)))


def log_warning(text: str) -> None:
    """Write a warning to train.log, which rank 0 of a run has open; without a handler, logging would print it."""
    if _log.hasHandlers():
        _log.warning(text)


def check_finite(
    step: int, loss: Tensor, ids: Tensor | list[int], *, report: Path, advice: str,
    gradient_norm: Tensor | None = None, check_gradient: bool = True,
) -> tuple[Tensor, float]:  # fmt: skip
    """Return the mean loss over ranks and the gradient norm; raise UserError on all ranks if one is not finite.

    Call it before the update: the weights stay as they were. The images of the step are written to `report`. One
    reduction and one wait for the device serve all checks.
    """
    local_loss = loss.detach().float()
    total = all_reduce_sum(torch.stack([(~local_loss.isfinite()).float(), local_loss]))
    norm = torch.zeros_like(local_loss) if gradient_norm is None else gradient_norm
    bad_losses, norm_value = torch.stack([total[0].to(norm.dtype), norm]).tolist()
    if not bad_losses and (math.isfinite(norm_value) or not check_gradient):
        return total[1] / rank_and_size()[1], norm_value
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    gathered = list(enumerate(all_gather_objects((str(float(local_loss)), ids))))
    # A loss belongs to one rank's images. The gradient is a mean over ranks, so any image may be the cause.
    suspects = [(rank, part) for rank, part in gathered if not bad_losses or not math.isfinite(float(part[0]))]
    if rank_and_size()[0] == 0:
        record = {
            "step": step,
            "loss": suspects[0][1][0],
            "gradient_norm": str(norm_value),
            "ranks": [rank for rank, _ in suspects],
            "ids": [image for _, (_, images) in suspects for image in images],
        }
        write_atomic(report, json.dumps(record) + "\n")
    barrier()
    where = f" on rank {suspects[0][0]}" if len(gathered) > 1 and bad_losses else ""
    raise UserError(
        f"step {step}: the {'loss' if bad_losses else 'gradient'} is not finite{where}; nothing was updated. The images"
        f" of the step are listed in {report}. {advice}"
    )
