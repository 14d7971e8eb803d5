"""Fine-tuning a detector: the loop, its checkpoints, and the finished detector on disk.

Several processes share each batch and give the result of one: batch norm and padding are those of the whole batch, the
choice of anchors and regions is by a seed an image, and each loss is the mean over all processes' anchors or regions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN

from snclr.detection.batches import DetectionSteps, StepSamples, read_steps
from snclr.detection.coco_folder import CocoSet
from snclr.detection.model import loss_counts, prepare
from snclr.detection.schedule import DetectSettings, learning_rate
from snclr.distributed import (
    broadcast_object,
    broadcast_tensors,
    fail_together,
    gather,
    gather_objects,
    sum_over_processes,
)
from snclr.durable import discard
from snclr.errors import UserError
from snclr.progress import Progress
from snclr.sync_batch_norm import synchronise_batch_norm
from snclr.train import state
from snclr.train.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from snclr.train.signals import StopRequest

SAVE_SECONDS = 300.0
"""Time between checkpoints: what a kill can cost."""
CHECKPOINTS, FINISHED = "checkpoints", "detector"


@dataclass
class DetectorTraining:
    """A fine-tuning under way: `train` goes on from the newest checkpoint in `folder`, if it is of this one.

    `identity` are JSON values that say what is trained on what: a checkpoint of anything else is refused.
    """

    model: MaskRCNN
    coco: CocoSet
    settings: DetectSettings
    folder: Path
    identity: dict[str, Any]
    fabric: Any
    workers: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    """Images of the training set that could not be read, and why."""

    def __post_init__(self) -> None:
        s = self.settings
        self.model = synchronise_batch_norm(self.model.to(self.fabric.device))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=s.peak_lr, momentum=s.momentum, weight_decay=s.weight_decay
        )
        self.wrapped, self.wrapped_optimizer = self.fabric.setup(self.model, self.optimizer)
        self.steps = DetectionSteps(self.coco, s, self.fabric.global_rank, self.fabric.world_size)

    def train(self, progress: Progress, stop: StopRequest) -> int:
        """Train to the end or until a stop is asked for; the number of steps done in all, of which nothing is lost."""
        step = saved = self._resume(progress)
        last = clock = time.monotonic()
        self.model.train()
        for batch in self._read(step):
            waited = time.monotonic() - clock
            loss = self._step(batch)
            step = batch.step + 1
            values = {"iteration": f"{step}/{self.settings.iterations}", "loss": loss}
            progress.update(self.settings.batch_size, waited, time.monotonic() - clock - waited, values)
            leave, save = self._agree(stop, time.monotonic() - last >= SAVE_SECONDS)
            if save:
                self._save(step)
                saved, last = step, time.monotonic()
            if leave:
                break
            clock = time.monotonic()
        if saved != step:
            self._save(step)
        return step

    def finish(self, extra: dict[str, Any]) -> None:
        """Keep the detector alone, once it is trained; `extra` is what a later evaluation needs to know of it."""
        bad = gather_objects(self.bad)
        if self.fabric.is_global_zero:
            tensors = {f"method/{name}": value for name, value in self.model.state_dict().items()}
            # By name: numbers mean nothing where the detector is tested on another set.
            unreadable = self.coco.unreadable({key: why for part in bad for key, why in part.items()}, "replaced")
            info = {"identity": self.identity, "unreadable": [asdict(fault) for fault in unreadable], **extra}
            save_checkpoint(self.folder / FINISHED, tensors, info, step=self.settings.iterations, keep=1)
            if (self.folder / CHECKPOINTS).is_dir():
                discard(self.folder / CHECKPOINTS)

    def _read(self, start: int) -> Iterator[StepSamples]:
        return read_steps(self.steps, start, self.settings.iterations, self.workers)

    def _step(self, batch: StepSamples) -> float:
        """One update; the loss of the whole batch."""
        self.bad |= batch.bad
        fail_together(None if batch.samples else self._too_bad(batch))
        sizes = torch.tensor([[s.picture.shape[1], s.picture.shape[2]] for s in batch.samples])
        height, width = gather(sizes.to(self.fabric.device)).amax(0).tolist()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(batch.step, self.settings)
        losses = self.wrapped(*prepare(self.model, batch.samples, self.fabric.device, (height, width)))
        loss, shown = self._whole_batch(losses)
        if not shown < float("inf"):
            raise UserError(
                f"step {batch.step}: the loss is not finite; nothing was updated. The learning rate "
                f"{self.settings.peak_lr:g} is too high: give a lower --lr"
            )
        self.wrapped_optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss)
        self.wrapped_optimizer.step()
        return shown

    def _whole_batch(self, losses: dict[str, Tensor]) -> tuple[Tensor, float]:
        """The loss to differentiate here, whose mean over the processes is that of the whole batch, and that mean.

        Each process's losses are means over its own anchors or regions: they are weighted by how many these are.
        """
        counts = loss_counts(self.model)
        own = torch.tensor([float(counts[name]) for name in losses], device=self.fabric.device)
        every = sum_over_processes(own.clone()).clamp(min=1)
        loss = (torch.stack(list(losses.values())).float() * own / every).sum() * self.fabric.world_size
        return loss, float(sum_over_processes(loss.detach().clone())) / self.fabric.world_size

    def _agree(self, stop: StopRequest, save: bool) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether the first wants to save: all must do the same."""
        if self.fabric.world_size == 1:
            return stop.requested is not None, save
        asked = torch.tensor([int(stop.requested or 0), int(save)], device=self.fabric.device)
        every = gather(asked[None])
        signal = int(every[:, 0].max())
        if signal:
            stop.request(signal)
        return bool(signal), bool(every[0, 1])

    def _too_bad(self, batch: StepSamples) -> UserError:
        examples = "; ".join(f"{self.coco.path(i)}: {why}" for i, why in list(batch.bad.items())[:3])
        return UserError(f"step {batch.step}: hardly an image of {self.coco.folder} can be read, such as {examples}")

    def _save(self, step: int) -> None:
        bad = gather_objects(self.bad)
        if self.fabric.is_global_zero:
            tensors, plain = state.collect(self.model, self.optimizer)
            info = {
                "identity": self.identity,
                "optimizer": plain,
                "precision": self.fabric.strategy.precision.state_dict(),
                "bad": {str(key): why for part in bad for key, why in part.items()},
            }
            save_checkpoint(self.folder / CHECKPOINTS, tensors, info, step=step, keep=1)
        self.fabric.barrier()

    def _resume(self, progress: Progress) -> int:
        found, error = None, None
        if self.fabric.is_global_zero:
            try:
                found = latest_checkpoint(self.folder / CHECKPOINTS, progress.say)
                check_identity(found, self.identity)
            except UserError as caught:
                error = caught
        fail_together(error)
        step, info = broadcast_object((0, None) if found is None else (found.step, found.info))
        if info is None:
            return 0
        tensors = broadcast_tensors(None if found is None else found.tensors, self.fabric.device)
        state.restore(tensors, info["optimizer"], self.model, self.optimizer)
        self.fabric.strategy.precision.load_state_dict(info["precision"])
        if self.fabric.is_global_zero:
            self.bad = {int(key): why for key, why in info["bad"].items()}
        progress.say(f"going on after iteration {step} of {self.settings.iterations}")
        progress.done = min(step * self.settings.batch_size, progress.total or 0)
        return step


def check_identity(found: Checkpoint | None, identity: dict[str, Any]) -> None:
    """Refuse a checkpoint of another fine-tuning."""
    if found is not None and found.info.get("identity") != json.loads(json.dumps(identity)):
        raise UserError(f"{found.path} is a checkpoint of another fine-tuning; delete {found.path.parent.parent}")
