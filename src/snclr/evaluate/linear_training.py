"""How linear classifiers are trained: on features as they come, or on features that are there; both can be stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from snclr.data.loader import Skip
from snclr.data.order import Ids
from snclr.distributed import rank_and_size
from snclr.errors import UserError
from snclr.evaluate.features import Encoded, frozen
from snclr.evaluate.images import Plan
from snclr.evaluate.linear_heads import LinearHeads
from snclr.evaluate.resume import Interrupted, Kept, stop_together
from snclr.evaluate.scoring import labelled
from snclr.progress import Progress
from snclr.train.schedule import warmup_cosine
from snclr.train.signals import StopRequest

_AGREE_STEPS = 20  # steps on cached features between two looks at the other processes


class Probe:
    """One head trained on batches of features as they come; y (n,) has the class of every image by its id.

    It starts from the state in `kept`, if there is one, and leaves its own there when it is stopped.
    """

    def __init__(self, head: LinearHeads, y: Tensor, plan: Plan, kept: Kept | None, progress: Progress) -> None:
        self.head, self.y, self.plan, self.kept, self.progress = head, y, plan, kept, progress
        self.step = self.seen = 0
        self.skipped: dict[int, Skip] = {}
        found = None if kept is None else kept.load("probe", progress.say)
        if found is not None:
            head.restore(found.tensors)
            self.step, self.seen, progress.done = found.step, found.info["seen"], found.info["done"]
            self.skipped = {entry["index"]: Skip(**entry) for entry in found.info["skipped"]}
            progress.say(f"going on after step {self.step:,} of {plan.steps:,}")

    def run(self, encoded: Iterator[Encoded]) -> None:
        """Train to the end, or until Interrupted."""
        done = self.progress.done
        try:
            for batch in encoded:
                if len(batch.ids):
                    x, target, _ = labelled(batch.features, self.y[batch.ids], "training")
                    loss = self.head.step(x, target, _cosine(self.step, self.plan.steps))
                    self.progress.values["loss"] = loss.item()
                self.step += 1
                self.seen += len(batch.ids)
                self.skipped.update({skip.index: skip for skip in batch.skipped})
                done = self.progress.done
                if self.kept is not None and self.kept.due:
                    self._save(done)
        except Interrupted:
            self._save(done)
            raise
        if self.kept is not None:
            self._save(done)  # the test that follows may be long

    def _save(self, done: int) -> None:
        if self.kept is not None and self.step:
            skipped = [asdict(skip) for skip in self.skipped.values()]
            self.kept.save("probe", self.step, self.head.state(), {"seen": self.seen, "done": done, "skipped": skipped})


def feature_width(encoder: nn.Module, image_size: int, device: torch.device | str) -> int:
    """How many features an encoder gives, by one black image."""
    encoder.to(device)
    with frozen(encoder), torch.inference_mode():
        features = encoder(torch.zeros(1, 3, image_size, image_size, device=device))
    if features.ndim != 2:
        raise UserError(
            f"the encoder gives {tuple(features.shape)} for an image; an encoder without its classifier, which gives "
            "(images, features), is needed"
        )
    return int(features.shape[1])


@dataclass
class Fit:
    """What every training of `linear_cached` has in common: features x (n, d), classes y (n,), settings."""

    x: Tensor
    y: Tensor
    num_classes: int
    epochs: int
    batch_size: int
    seed: int
    quiet: bool
    device: torch.device
    kept: Kept | None
    stop: StopRequest | None

    def __post_init__(self) -> None:
        variance, self.mean = torch.var_mean(self.x.float(), dim=0, correction=0)
        # A feature that never changes has nothing to say, and is not to be divided by zero.
        self.scale = torch.where(variance > 1e-12, variance, 1.0).rsqrt()

    def standardise(self, x: Tensor) -> Tensor:
        """Features (n, d) by the training set's mean and deviation."""
        return (x.float() - self.mean) * self.scale

    def rows(self, chosen: Ids) -> tuple[Tensor, Tensor]:
        """Standardised features and classes of some rows, where the heads are."""
        index = torch.from_numpy(chosen).to(self.x.device)
        return self.standardise(self.x[index]).to(self.device), self.y[index].to(self.device)

    def train(self, rows: Ids, learning_rates: Sequence[float], stage: str) -> LinearHeads:
        """Train a head for each learning rate on some rows; batch by batch, so the features are never copied whole.

        Every process does the same: no features need be sent around.
        """
        heads = LinearHeads(self.x.shape[1], self.num_classes, learning_rates, device=self.device)
        batch = min(self.batch_size, len(rows))
        plan = Plan(rows, batch=batch, chunk=batch, epochs=self.epochs, seed=self.seed)
        with (
            heads.fitting_threads(batch),
            Progress("linear classifier", total=self.epochs * len(rows), quiet=hidden(self.quiet)) as progress,
        ):
            found = None if self.kept is None else self.kept.load(stage, progress.say)
            if found is not None:
                heads.restore(found.tensors)
                progress.done = found.info["done"]
            for step in range(found.step if found else 0, plan.steps):
                x, y = self.rows(plan.request(step).ids)
                heads.step(x, y, _cosine(step, plan.steps))
                progress.update(len(y))
                self._look_up(stage, step + 1, heads, progress)
            if self.kept is not None and len(learning_rates) > 1:  # the other stage comes after it
                self.kept.save(stage, plan.steps, heads.state(), {"done": progress.done})
        return heads

    def _look_up(self, stage: str, step: int, heads: LinearHeads, progress: Progress) -> None:
        """From time to time: is there a stop, is it time to save? A step may take a millisecond, so not at each."""
        alone = rank_and_size()[1] == 1
        if not alone and step % _AGREE_STEPS:
            return
        try:
            if not alone or (self.stop is not None and self.stop.requested is not None):
                stop_together(self.stop)
        except Interrupted:
            if self.kept is not None:
                self.kept.save(stage, step, heads.state(), {"done": progress.done})
            raise
        if self.kept is not None and self.kept.due:
            self.kept.save(stage, step, heads.state(), {"done": progress.done})


def hidden(quiet: bool) -> bool:
    """Only process 0 shows progress."""
    return quiet or rank_and_size()[0] > 0


def _cosine(step: int, steps: int) -> float:
    return warmup_cosine(step, total_steps=steps, warmup_steps=0, peak=1.0)
