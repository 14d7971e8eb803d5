"""Linear classifiers on a frozen encoder: many heads trained at once, or MAE's with a batch norm.

They are trained on augmented views or on cached features.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.checkpoint.format import Checkpoint
from snclr.data.datasets.base import ImageDataset
from snclr.data.loader import Skip
from snclr.data.sampler import Ids
from snclr.evaluation.features import BatchPlan, encode_batches
from snclr.evaluation.scoring import labeled
from snclr.runtime.device import limit_threads, to_device
from snclr.train.optim import LARS
from snclr.train.schedule import warmup_cosine
from snclr.train.trainer import TrainTask

_SMALL_STEP = 2**28  # multiplications per step: about ten milliseconds on one core


class LinearHeads:
    """G softmax classifiers (d features, C classes), trained by SGD with momentum 0.9 and no weight decay.

    They start at zero, which is enough for a convex problem. All heads train on the same batches and differ only in
    their learning rate. The gradient is written out, because all heads share its matrix product.

    >>> heads = LinearHeads(2, 2, learning_rates=[0.1, 1.0])
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> loss = heads.step(x, y)
    >>> heads.logits(x).argmax(dim=2).tolist()  # (G, n)
    [[0, 1], [0, 1]]
    """

    momentum = 0.9

    def __init__(
        self, dim: int, num_classes: int, learning_rates: Sequence[float], *, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = (len(learning_rates), num_classes)
        columns = len(learning_rates) * num_classes
        self.weight = torch.zeros(dim, columns, device=device)  # columns of all heads: one matrix product
        self.bias = torch.zeros(columns, device=device)
        self._velocity = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        self._lr = torch.tensor(learning_rates, device=device).repeat_interleave(num_classes)

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """Update on features (n, d) and classes (n,) with learning rates × `scale`; return the losses (G,) before."""
        log_p = self._scores(x).log_softmax(dim=2)  # (n, G, C)
        picked = y[:, None, None].expand(-1, self.shape[0], 1)
        loss = -log_p.gather(2, picked).mean(dim=(0, 2))
        # Smaller probabilities contribute no gradient, but denormal numbers make the product ten times slower.
        p = log_p.clamp_(min=-50).exp_()
        gradient = p.scatter_add_(2, picked, torch.full_like(picked, -1, dtype=x.dtype))  # p − one-hot
        gradient = gradient.flatten(1).div_(len(x))
        velocity, bias_velocity = self._velocity
        velocity.mul_(self.momentum).addmm_(x.T, gradient)
        bias_velocity.mul_(self.momentum).add_(gradient.sum(dim=0))
        self.weight.addcmul_(velocity, self._lr, value=-scale)
        self.bias.addcmul_(bias_velocity, self._lr, value=-scale)
        return loss

    def state(self) -> dict[str, Tensor]:
        """Return weights and momentum by name; the tensors are not copied."""
        velocity, bias_velocity = self._velocity  # saved under the names of earlier versions
        return {"weight": self.weight, "bias": self.bias, "speed": velocity, "bias_speed": bias_velocity}

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of features (n, d) for every head: (G, n, C)."""
        return self._scores(x).transpose(0, 1)

    def fitting_threads(self, batch: int) -> contextlib.AbstractContextManager[None]:
        """Use one thread if a step on the CPU is so small that more threads would mostly wait."""
        small = self.weight.device.type == "cpu" and batch * self.weight.numel() < _SMALL_STEP
        return limit_threads(1 if small else 0)

    def _scores(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).view(len(x), *self.shape)


class NormalizedHead:
    """One softmax classifier after a batch norm without parameters, trained by LARS: the linear protocol of MAE.

    It has the interface of `LinearHeads` with a single head. The batch norm standardizes the features by the statistics
    of the batch, and in `logits` by their running averages. LARS scales a step by the norm of the weights, so they
    start at small random values and not at zero.
    """

    def __init__(
        self, dim: int, num_classes: int, learning_rate: float, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.norm = nn.BatchNorm1d(dim, affine=False, eps=1e-6, device=device)
        generator = torch.Generator().manual_seed(seed)
        weight = nn.init.trunc_normal_(torch.empty(num_classes, dim), std=0.01, generator=generator)
        self.weight = nn.Parameter(weight.to(device))
        self.bias = nn.Parameter(torch.zeros(num_classes, device=device))
        self.optimizer = LARS([self.weight, self.bias], lr=learning_rate)
        for parameter in (self.weight, self.bias):  # so that `state` has them before the first step
            self.optimizer.state[parameter]["mu"] = torch.zeros_like(parameter)
        self._lr = learning_rate

    def step(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """Update on features (n, d) and classes (n,) with the learning rate × `scale`; return the loss (1,) before."""
        self.norm.train(len(x) > 1)  # a single row has no variance
        loss = F.cross_entropy(F.linear(self.norm(x), self.weight, self.bias), y)
        self.weight.grad, self.bias.grad = torch.autograd.grad(loss, (self.weight, self.bias))
        self.optimizer.param_groups[0]["lr"] = self._lr * scale
        self.optimizer.step()
        return loss.detach()[None]

    def state(self) -> dict[str, Tensor]:
        """Return weights, momentum and statistics by name; the tensors are not copied."""
        speed, bias_speed = (self.optimizer.state[parameter]["mu"] for parameter in (self.weight, self.bias))
        mean, variance, _ = self.norm.buffers()
        return {
            "weight": self.weight.detach(), "bias": self.bias.detach(), "speed": speed, "bias_speed": bias_speed,
            "mean": mean, "variance": variance,
        }  # fmt: skip

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of features (n, d): (1, n, C)."""
        return F.linear(self.norm.eval()(x), self.weight, self.bias)[None]


class FeatureBatch(NamedTuple):
    """Features x (n, d) and classes y (n,) of one step."""

    step: int
    x: Tensor
    y: Tensor


class LinearTask(TrainTask[FeatureBatch]):
    """Train linear heads on the batches of a plan, the same on every rank: linear warm-up, then cosine to 0."""

    def __init__(self, heads: LinearHeads | NormalizedHead, plan: BatchPlan, *, warmup_epochs: float = 0.0) -> None:
        self.heads, self.plan = heads, plan
        self.warmup_steps = round(warmup_epochs * plan.steps_per_epoch)
        self.total_steps, self.steps_per_epoch = plan.steps, plan.steps_per_epoch

    def images_after(self, step: int) -> int:
        """Return the images used by the first `step` steps."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch * len(self.plan.ids) + batch * self.plan.batch

    def step(self, batch: FeatureBatch, *, log: bool) -> dict[str, Any]:
        """Update all heads; return the loss of a single head."""
        if not len(batch.y):  # no image of the batch could be read
            return {}
        scale = warmup_cosine(
            batch.step, total_steps=self.total_steps, warmup_steps=self.warmup_steps, peak=1.0, start=0.0
        )
        loss = self.heads.step(batch.x, batch.y, scale)
        return {"loss": loss.item()} if log and len(loss) == 1 else {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and momentum."""
        return self.heads.state(), {}

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore what `state` returned."""
        for name, value in self.heads.state().items():
            value.copy_(checkpoint.tensors[name])


class AugmentedTask(LinearTask):
    """Encode random crops in every step; `y` (n,) has the class of each image of the dataset."""

    def __init__(
        self, heads: LinearHeads | NormalizedHead, plan: BatchPlan, y: Tensor, encoder: nn.Module,
        dataset: ImageDataset, *, warmup_epochs: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(heads, plan, warmup_epochs=warmup_epochs)
        self.y, self.encoder, self.dataset, self.options = y, encoder, dataset, options
        self.skipped: dict[int, Skip] = {}

    def batches(self, start: int) -> Iterator[FeatureBatch]:
        """Encode the batches of the plan; each rank encodes its part and gets all of it."""
        encoded = encode_batches(
            self.encoder, self.dataset, self.plan, start=start, progress=self.progress, **self.options
        )
        for step, batch in enumerate(encoded, start=start):
            self.skipped.update({skip.index: skip for skip in batch.skipped})
            x, y = batch.features, self.y[batch.ids]
            if len(y):
                x, y, _ = labeled(x, y, "training")
            yield FeatureBatch(step, x, y)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the heads and the unreadable images."""
        return self.heads.state(), {"skipped": [asdict(skip) for skip in self.skipped.values()]}

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore what `state` returned."""
        super().load_state(checkpoint)
        self.skipped = {entry["index"]: Skip(**entry) for entry in checkpoint.info["skipped"]}


class StandardizedFeatures:
    """Features x (n, d) with classes y (n,), standardized by their mean and deviation when they are read."""

    def __init__(self, x: Tensor, y: Tensor, device: torch.device) -> None:
        self.x, self.y, self.device = x, y, device
        variance, self.mean = torch.var_mean(x.float(), dim=0, correction=0)
        # A constant feature has no information; do not divide it by zero.
        self.scale = torch.where(variance > 1e-12, variance, 1.0).rsqrt()

    def standardize(self, x: Tensor) -> Tensor:
        """Standardize features (n, d) by the statistics of this set."""
        return (x.float() - self.mean) * self.scale

    def rows(self, chosen: Ids) -> tuple[Tensor, Tensor]:
        """Return standardized features and classes of some rows, on `device`."""
        index = torch.from_numpy(chosen).to(self.x.device)
        return to_device(self.standardize(self.x[index]), self.device), to_device(self.y[index], self.device)


class CachedTask(LinearTask):
    """Train on features in memory. Every rank does the same work, so no features are sent."""

    def __init__(self, heads: LinearHeads, plan: BatchPlan, features: StandardizedFeatures) -> None:
        super().__init__(heads, plan)
        self.features = features

    def batches(self, start: int) -> Iterator[FeatureBatch]:
        """Standardize one batch at a time, so that the features are never copied as a whole."""
        for step in range(start, self.total_steps):
            yield FeatureBatch(step, *self.features.rows(self.plan.request(step).ids))
