"""The momentum copy: a second network that follows the trained one as an exponential moving average."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from snclr.errors import UserError

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MOMENTUM_SCHEDULES = ("constant", "cosine")


def momentum_copy(module: ModuleT) -> ModuleT:
    """Return a deep copy of ``module`` whose parameters take no gradient.

    >>> momentum = momentum_copy(nn.Linear(3, 2))
    >>> any(p.requires_grad for p in momentum.parameters())
    False
    """
    momentum = copy.deepcopy(module)
    return momentum.requires_grad_(False)


@torch.no_grad()
def ema_update(online: nn.Module, momentum: nn.Module, m: float) -> None:
    """Move every parameter of ``momentum`` to m · momentum + (1 − m) · online, in place.

    Buffers are left alone: the copy runs in train mode, so its batch norms gather running statistics from its own
    forward passes. Those belong to its own weights; an average with the online network's would describe neither.
    """
    if not 0.0 <= m <= 1.0:
        raise UserError(f"The momentum is {m}; it must lie between 0 and 1.")
    targets: list[Tensor] = list(momentum.parameters())
    sources: list[Tensor] = list(online.parameters())
    assert len(targets) == len(sources), "the momentum copy has other parameters than the online network"
    if targets:
        # lerp rather than scale-and-add: a parameter that equals its source (a frozen one) stays equal to the last bit.
        torch._foreach_lerp_(targets, sources, 1.0 - m)


def momentum_at(step: int, total: int, base: float, schedule: str = "constant") -> float:
    """Return the momentum for update ``step`` of ``total``: ``base`` throughout, or rising to 1 along a cosine.

    >>> momentum_at(50, 100, 0.99), momentum_at(0, 100, 0.99, "cosine"), momentum_at(100, 100, 0.99, "cosine")
    (0.99, 0.99, 1.0)
    """
    if not 0.0 <= base <= 1.0:
        raise UserError(f"The momentum is {base}; it must lie between 0 and 1.")
    if schedule not in MOMENTUM_SCHEDULES:
        raise UserError(f"Unknown momentum schedule {schedule!r}; choose one of {', '.join(MOMENTUM_SCHEDULES)}.")
    if total < 1 or step < 0:
        raise UserError(f"Step {step} of {total} is not a training step; both count from 0, with at least one step.")
    if schedule == "constant":
        return base
    progress = min(step / total, 1.0)
    return 1.0 - (1.0 - base) * (1.0 + math.cos(math.pi * progress)) / 2.0
