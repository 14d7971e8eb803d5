"""Exponential moving average (EMA) of a network."""

import copy
import math

import torch
from torch import Tensor, nn


def momentum_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy of `module` whose parameters take no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def ema_update(online: nn.Module, target: nn.Module, m: float) -> None:
    """Set every parameter of `target` to m · target + (1 − m) · online, in place.

    Buffers are not averaged. The target network runs in train mode, so its batch norms collect the running statistics
    of its own forward passes.
    """
    targets: list[Tensor] = list(target.parameters())
    sources: list[Tensor] = list(online.parameters())
    assert len(targets) == len(sources), "online and target network have different parameters"
    if targets:
        # lerp keeps a parameter that equals its source (a frozen one) bit-identical; scale-and-add does not.
        torch._foreach_lerp_(targets, sources, 1.0 - m)


def auto_momentum(batch_size: int, images: int) -> float:
    """Return 1 − batch / (0.32 · images), between 0.5 and 0.999: an average over the last 0.32 epochs.

    That is the ratio in SNCLR's paper: momentum 0.99 with batches of 4096 of 1.28 million images.

    >>> round(auto_momentum(4096, 1_281_167), 3), round(auto_momentum(128, 6000), 3), auto_momentum(128, 300)
    (0.99, 0.933, 0.5)
    """
    return min(max(1 - batch_size / (0.32 * images), 0.5), 0.999)


def momentum_at(step: int, total: int, base: float, schedule: str = "constant") -> float:
    """Return the momentum of update `step` out of `total`: constant at `base`, or rising to 1 along a cosine.

    >>> momentum_at(50, 100, 0.99), momentum_at(0, 100, 0.99, "cosine"), momentum_at(100, 100, 0.99, "cosine")
    (0.99, 0.99, 1.0)
    """
    if schedule == "constant":
        return base
    progress = min(step / total, 1.0)
    return 1.0 - (1.0 - base) * (1.0 + math.cos(math.pi * progress)) / 2.0
