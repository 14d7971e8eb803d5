"""Fine-tune a detector, and keep it on disk; the result does not depend on the world size.

Batch norm and padding use the global batch, anchors and regions are sampled with one seed per image, and each loss is a
mean over the anchors or regions of all ranks.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN

from snclr.checkpoint.format import Checkpoint, latest_checkpoint, save_checkpoint
from snclr.checkpoint.state import collect_state, load_method_state, restore_state
from snclr.data.workers import read_items
from snclr.distributed.collectives import all_gather_ints, all_reduce_sum, raise_on_all_ranks
from snclr.distributed.sync_batch_norm import synchronize_batch_norm
from snclr.errors import UserError
from snclr.evaluation.detection.batches import DetectionSteps, StepSamples
from snclr.evaluation.detection.coco import CocoSet, Fault
from snclr.evaluation.detection.model import build_detector, loss_counts, training_inputs
from snclr.evaluation.detection.settings import DetectSettings, learning_rate
from snclr.evaluation.state import EvalState
from snclr.io.atomic import discard
from snclr.models.encoders import EncoderSpec, build_encoder
from snclr.runtime.device import to_device
from snclr.train.trainer import TrainTask, check_finite

CHECKPOINTS = "checkpoints"
_FINISHED = "detector"  # subfolder of a trained detector


@dataclass
class DetectionTask(TrainTask[StepSamples]):
    """Fine-tune a Mask R-CNN on a COCO set."""

    model: MaskRCNN
    coco: CocoSet
    settings: DetectSettings
    fabric: Any
    nonfinite: Path
    """Where the images of a step with a non-finite loss are listed."""
    workers: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    """Unreadable training images and the reasons."""

    def __post_init__(self) -> None:
        s = self.settings
        self.model = synchronize_batch_norm(self.model.to(self.fabric.device))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=s.peak_lr, momentum=s.momentum, weight_decay=s.weight_decay
        )
        self.wrapped, self.wrapped_optimizer = self.fabric.setup(self.model, self.optimizer)
        self.total_steps = s.iterations
        self.steps_per_epoch = max(1, len(self.coco) // s.batch_size)
        self._found_bad: dict[int, str] = {}  # by this rank

    def images_after(self, step: int) -> int:
        """Return the images used by the first `step` steps."""
        return step * self.settings.batch_size

    def batches(self, start: int) -> Iterator[StepSamples]:
        """Yield this rank's samples from step `start` on."""
        self.model.train()
        steps = DetectionSteps(self.coco, self.settings, self.fabric.global_rank, self.fabric.world_size)
        for batch in read_items(steps, start, self.total_steps, workers=self.workers):
            self._found_bad.update(batch.bad)
            if not batch.samples:
                examples = "; ".join(f"{self.coco.path(i)}: {why}" for i, why in list(batch.bad.items())[:3])
                raise UserError(
                    f"step {batch.step}: almost no image of {self.coco.folder} can be read, such as {examples}"
                )
            yield batch

    def step(self, batch: StepSamples, *, log: bool) -> dict[str, Any]:
        """Run one step: learning rate, forward, non-finite check, backward, update."""
        local = [max(s.image.shape[side] for s in batch.samples) for side in (1, 2)]
        height, width = (max(sides) for sides in zip(*all_gather_ints(local), strict=True))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(batch.step, self.settings)
        losses = self.wrapped(*training_inputs(self.model, batch.samples, self.fabric.device, (height, width)))
        loss = self._global_loss(losses)
        mean_loss, _ = check_finite(
            batch.step, loss, [sample.number for sample in batch.samples], report=self.nonfinite,
            advice=f"The learning rate {self.settings.peak_lr:g} is too high: give a lower --lr.",
        )  # fmt: skip
        self.wrapped_optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss)
        self.wrapped_optimizer.step()
        return {"loss": float(mean_loss)} if log else {}

    def _global_loss(self, losses: dict[str, Tensor]) -> Tensor:
        """Return this rank's loss; its mean over the ranks is the loss of the global batch.

        Each loss is a mean over the anchors or regions of one rank, so it is weighted by their number.
        """
        counts = loss_counts(self.model)
        local_counts = to_device(torch.tensor([float(counts[name]) for name in losses]), self.fabric.device)
        total = all_reduce_sum(local_counts.clone()).clamp(min=1)
        return (torch.stack(list(losses.values())).float() * local_counts / total).sum() * self.fabric.world_size

    def new_skips(self) -> list[Any]:
        """Return the unreadable images that only this rank has found."""
        return [(number, why) for number, why in self._found_bad.items() if number not in self.bad]

    def merge_skips(self, parts: list[list[Any]]) -> None:
        """Take the unreadable images of all ranks."""
        self.bad.update(item for part in parts for item in part)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return model, optimizer and the unreadable images."""
        return collect_state(self.model, self.optimizer), {
            "precision": self.fabric.strategy.precision.state_dict(),
            "bad": {str(number): why for number, why in self.bad.items()},
        }

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of this fine-tuning."""
        restore_state(checkpoint.tensors, self.model, self.optimizer)
        self.fabric.strategy.precision.load_state_dict(checkpoint.info["precision"])
        self.bad = {int(number): why for number, why in checkpoint.info["bad"].items()}


@dataclass(frozen=True)
class Detector:
    """A trained detector and its description."""

    model: MaskRCNN
    settings: DetectSettings
    folder: Path
    start: str
    """Origin of the initial weights."""
    protocol: str
    categories: dict[int, str]
    unreadable: list[Fault]
    """Unreadable images of its training set."""


def save_detector(task: DetectionTask, saved: EvalState, *, start: str, protocol: str) -> None:
    """Write a trained detector beside the checkpoints of its training, and delete these."""
    # The names of `collect_state`, which has this prefix for any trained module.
    tensors = {f"method/{name}": value for name, value in task.model.state_dict().items()}
    # With file names, because the detector may be evaluated on another dataset.
    unreadable = [asdict(fault) for fault in task.coco.unreadable(task.bad, "replaced")]
    info = {"identity": saved.identity, "unreadable": unreadable, "start": start, "protocol": protocol}
    save_checkpoint(saved.folder / _FINISHED, tensors, info, step=task.total_steps, keep=1)
    if (saved.folder / CHECKPOINTS).is_dir():
        discard(saved.folder / CHECKPOINTS)


@raise_on_all_ranks()
def open_detector(folder: Path, device: torch.device) -> Detector | None:
    """Open the trained detector of a folder, on every rank; return None if there is none."""
    checkpoint = latest_checkpoint(folder / _FINISHED, lambda text: None) if (folder / _FINISHED).is_dir() else None
    if checkpoint is None:
        return None
    info, identity = checkpoint.info, checkpoint.info["identity"]
    given = identity["settings"]
    settings = DetectSettings(**{**given, "short_side": tuple(given["short_side"])})
    spec = EncoderSpec.from_dict(identity["encoder"])
    categories = {int(key): str(name) for key, name in identity["categories"]}
    model = build_detector(build_encoder(spec), spec, len(categories), settings)
    load_method_state(checkpoint.tensors, model)
    unreadable = [Fault(**entry) for entry in info.get("unreadable", ())]
    model.to(device).eval()
    protocol = info["protocol"] if "protocol" in info else info["words"]  # its name in earlier versions
    return Detector(model, settings, folder, info["start"], protocol, categories, unreadable)
