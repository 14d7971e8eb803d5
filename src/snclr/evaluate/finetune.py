"""Fine-tuning on few labels: the whole network and a linear head, by the semi-supervised protocol of the field.

The protocol and its defaults are those of SimCLR (Chen et al., 2020, appendix B.5): SGD with Nesterov momentum 0.9,
learning rate 0.05 × batch / 256, cosine to 0 without warm-up, no weight decay, random resized crops and flips, 60
epochs on 1 % of the labels and 30 on more; a head that starts at zero. The batch (SimCLR: 4096) is 256 here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.data.loader import Batch, Skip, ViewLoader
from snclr.data.sources import Source
from snclr.data.views import TRAIN_CROP
from snclr.distributed import fail_together, gather_objects, rank_and_size, sum_over_processes
from snclr.encoders import EncoderSpec, build_encoder
from snclr.errors import UserError
from snclr.evaluate.features import extract_features
from snclr.evaluate.resume import load_together
from snclr.evaluate.scoring import check_classes, labelled, top_shares, true_ranks
from snclr.progress import Progress
from snclr.sync_batch_norm import synchronise_batch_norm
from snclr.train import state
from snclr.train.checkpoint import save_checkpoint
from snclr.train.schedule import warmup_cosine
from snclr.train.signals import StopRequest

SAVE_SECONDS = 120.0
"""Time between checkpoints: what a kill can cost."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """All that decides what a fine-tuning computes. The learning rates are those of the first step."""

    epochs: int
    batch_size: int
    lr: float
    head_lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.epochs < 1 or self.batch_size < 2:
            raise UserError(
                f"epochs is {self.epochs} and batch_size {self.batch_size}; needed are at least 1 and 2 (a batch norm "
                "cannot learn from one image)"
            )
        for name in ("lr", "head_lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a finite number of 0 or more")


def default_epochs(share: Fraction) -> int:
    """SimCLR's: 60 on 1 % of the labels (or less), 30 on more.

    >>> default_epochs(Fraction(1, 100)), default_epochs(Fraction(1, 10))
    (60, 30)
    """
    return 60 if share < Fraction(3, 200) else 30


class Classifier(nn.Module):
    """An encoder and a linear head that starts at zero: images (N, 3, S, S) to scores (N, C)."""

    def __init__(self, encoder: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(num_features, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of a batch."""
        scores: Tensor = self.head(self.encoder(images))
        return scores


def build_classifier(
    encoder: nn.Module, spec: EncoderSpec, num_classes: int, *, from_scratch: bool, seed: int
) -> Classifier:
    """The network to fine-tune; `from_scratch` gives it new weights by the seed: the "supervised" row of the tables."""
    if from_scratch:
        torch.manual_seed(seed)
        encoder = build_encoder(spec)
    if spec.frozen_patch_embed:  # a trick of pre-training; fine-tuning is of the whole network
        encoder.get_submodule("patch_embed.proj").requires_grad_(True)
    return Classifier(encoder, spec.num_features, num_classes)


@dataclass
class Finetuning:
    """A fine-tuning under way: `train` goes on from the newest checkpoint in `checkpoints`, if it is of this one.

    `identity` are JSON values that say what is trained on what: a checkpoint of anything else is refused.
    """

    model: Classifier
    source: Source
    classes: Tensor
    """(C,) the class numbers, sorted, that the head's outputs stand for."""
    settings: FinetuneSettings
    image_size: int
    checkpoints: Path
    identity: dict[str, Any]
    workers: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.model.encoder.to(memory_format=torch.channels_last)
        self.model = synchronise_batch_norm(self.model)
        s = self.settings
        self.rank, self.processes = rank_and_size()
        groups = [{"params": [p for p in self.model.encoder.parameters() if p.requires_grad], "lr": s.lr}]
        groups.append({"params": list(self.model.head.parameters()), "lr": s.head_lr})
        self.optimizer = torch.optim.SGD(
            groups, lr=s.lr, momentum=s.momentum, nesterov=s.momentum > 0, weight_decay=s.weight_decay
        )
        # Every share of bad images is taken: they are replaced by others, listed, and counted in the result.
        self.loader = ViewLoader(
            self.source, views=(TRAIN_CROP,), image_size=self.image_size, batch_size=s.batch_size, seed=s.seed,
            workers=self.workers, rank=self.rank, world_size=self.processes, device=self.device, max_bad_share=1.0,
        )  # fmt: skip

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.settings.epochs * self.loader.steps_per_epoch

    @property
    def skipped(self) -> list[Skip]:
        """The training images that could not be read, by any process (each must ask)."""
        found = {skip.index: skip for skips in gather_objects(self.loader.skipped) for skip in skips}
        return list(found.values())

    def train(self, progress: Progress, stop: StopRequest) -> int:
        """Train to the end or until a stop is asked for; the number of steps done in all, of which nothing is lost."""
        step = saved = self._resume(progress)
        last = time.monotonic()
        clock = time.perf_counter()
        self.model.train()
        for batch in self._batches(step):
            waited = time.perf_counter() - clock
            loss = self._step(batch)
            step = batch.step + 1
            progress.update(
                len(batch.ids) * self.processes, waited, time.perf_counter() - clock - waited,
                {"epoch": f"{batch.epoch + 1}/{self.settings.epochs}", "loss": loss},
            )  # fmt: skip
            # What one process decides by its clock or its signals, all do in the same step.
            news = gather_objects((stop.requested, time.monotonic() - last >= SAVE_SECONDS))
            asked = next((number for number, _ in news if number is not None), None)
            if news[0][1]:
                self._save(step)
                saved, last = step, time.monotonic()
            if asked is not None:
                stop.request(asked)
                break
            clock = time.perf_counter()
        else:
            if step < self.total_steps:
                stop.request(next(number for number in gather_objects(stop.requested) if number is not None))
        if saved != step:
            self._save(step)
        return step

    def _batches(self, start: int) -> Iterator[Batch]:
        """This process's batches; where one cannot read its images, or was stopped in a wait for them, all end."""
        batches = self.loader.batches(start, self.total_steps)
        while True:
            batch, failure = None, None
            try:
                batch = next(batches, None)
            except UserError as error:
                failure = error
            fail_together(failure)
            if any(gather_objects(batch is None)) or batch is None:
                return
            yield batch

    def _step(self, batch: Batch) -> float:
        s = self.settings
        for group, peak in zip(self.optimizer.param_groups, (s.lr, s.head_lr), strict=True):
            group["lr"] = warmup_cosine(batch.step, total_steps=self.total_steps, warmup_steps=0, peak=peak)
        # Dropout and drop-path draw from the global generator: seeded by the step, it has no state to save. Processes
        # have other images, and draw other numbers.
        torch.manual_seed(s.seed * 1_000_003 + batch.step + self.rank * 1_000_000_007)
        assert batch.labels is not None
        target = torch.searchsorted(self.classes.to(batch.labels.device), batch.labels)
        loss = F.cross_entropy(self.model(batch.views[0]).float(), target)
        mean = sum_over_processes(loss.detach().clone()) / self.processes
        if not bool(mean.isfinite()):
            raise UserError(
                f"step {batch.step}: the loss is not finite; the learning rates {s.lr:g} (encoder) and {s.head_lr:g} "
                "(head) are too high. Give a lower --lr or --head-lr"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._average_gradients()
        self.optimizer.step()
        return float(mean)

    def _average_gradients(self) -> None:
        """The gradient of the whole batch: its parts are equally large, so the mean of the processes' own."""
        if self.processes == 1:
            return
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        together = sum_over_processes(torch.cat([gradient.flatten() for gradient in gradients])) / self.processes
        start = 0
        for gradient in gradients:
            gradient.copy_(together[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def _save(self, step: int) -> None:
        skipped = self.skipped
        if self.rank == 0:
            tensors, plain = state.collect(self.model, self.optimizer)
            info = {"identity": self.identity, "optimizer": plain, "skipped": [asdict(skip) for skip in skipped]}
            save_checkpoint(self.checkpoints, tensors, info, step=step, keep=1)

    def _resume(self, progress: Progress) -> int:
        found = load_together(self.checkpoints, progress.say)
        if found is None:
            return 0
        if found.info.get("identity") != self.identity:
            raise UserError(f"{found.path} is a checkpoint of another fine-tuning; delete {self.checkpoints.parent}")
        state.restore(found.tensors, found.info["optimizer"], self.model, self.optimizer)
        self.loader.restore_skipped([Skip(**entry) for entry in found.info["skipped"]])
        progress.say(f"going on after step {found.step} of {self.total_steps}")
        progress.done = min(found.step * self.settings.batch_size, progress.total or 0)
        return found.step


@dataclass(frozen=True)
class Score:
    """Accuracies in [0, 1] on the test images; `top5` is None with five classes or fewer."""

    top1: float
    top5: float | None
    images: int
    left_out: int
    skipped: list[Skip]


def evaluate_classifier(
    model: Classifier, classes: Tensor, test: Source, labels: Any, *, image_size: int, workers: int, device: str,
    quiet: bool, stop: StopRequest | None = None,
) -> Score:  # fmt: skip
    """Top-1 and top-5 on the centre crops of a test set whose labels (n,) are numbered as the classes (C,) are."""
    tested = extract_features(
        model, test, image_size=image_size, workers=workers, device=device, labels=labels, description="test",
        stop=stop, quiet=quiet,
    )  # fmt: skip
    scores, truth, left_out = labelled(tested.features, tested.labels, "test")
    ranks = true_ranks(scores, torch.searchsorted(classes, truth))
    return Score(*top_shares(ranks, len(classes)), len(truth), left_out, tested.skipped)


def subset_classes(subset_labels: Tensor, test_labels: Tensor) -> Tensor:
    """The classes (C,) of the labelled images; UserError below two, or where the test set has others."""
    classes, known = check_classes(subset_labels, test_labels)
    if not bool(known.all()):
        lost = torch.unique(test_labels[~known])
        raise UserError(
            f"{len(lost)} of the test images' classes have no labelled training image (class {lost[0].item()} is one); "
            "label at least one image of each class"
        )
    return classes
