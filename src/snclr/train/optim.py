"""Optimisers by name, with the parameter groups every recipe of this field uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from snclr.errors import UserError

OPTIMIZERS = ("lars", "adamw", "sgd")

# Learned tokens and positions of transformers: offsets, like biases, although they have more than one dimension.
_OFFSETS = frozenset({"cls_token", "dist_token", "reg_token", "pos_embed", "relative_position_bias_table"})


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which each weight tensor's step is scaled to its own norm (You et al., 2017).

    For a weight p with gradient g: u = g + weight_decay · p, scaled by trust · ‖p‖ / ‖u‖ (by 1 where either norm is
    0); then mu = momentum · mu + u and p = p − lr · mu. Tensors of one dimension or none (biases, norms) take plain
    momentum SGD steps: neither decayed nor scaled.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Biases and norms apart from weights: each set is then one sequence of foreach calls.
            for weights in (True, False):
                params = [p for p in group["params"] if p.grad is not None and (p.ndim > 1) is weights]
                if params:
                    self._update(params, group, adapt=weights)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any], *, adapt: bool) -> None:
        """Take one step on tensors that are all adapted and decayed, or all neither."""
        updates = [p.grad for p in params if p.grad is not None]
        if adapt:
            # Not in place: the gradients belong to the caller.
            updates = list(torch._foreach_add(updates, params, alpha=group["weight_decay"]))
            torch._foreach_mul_(updates, _trust_ratios(params, updates, group["trust"]))
        for p in params:
            if "mu" not in self.state[p]:
                self.state[p]["mu"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        mus = [self.state[p]["mu"] for p in params]
        torch._foreach_mul_(mus, group["momentum"])
        torch._foreach_add_(mus, updates)
        torch._foreach_add_(params, mus, alpha=-group["lr"])


def _trust_ratios(params: list[Tensor], updates: list[Tensor], trust: float) -> list[Tensor]:
    """Return trust · ‖p‖ / ‖u‖ for each pair as scalar tensors on their device; 1 where a norm is 0."""
    param_norms = torch.stack(list(torch._foreach_norm(params)))
    update_norms = torch.stack(list(torch._foreach_norm(updates)))
    usable = (param_norms > 0) & (update_norms > 0)
    ratios = torch.where(usable, trust * param_norms / update_norms, torch.ones_like(param_norms))
    return list(ratios.unbind())


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Return optimiser ``name`` over the parameters that take a gradient, in the order given.

    There are always two groups: decayed weights first, then everything kept from decay (biases, norms, class tokens
    and positions). ``momentum`` is for lars and sgd, ``betas`` for adamw.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = build_optimizer("sgd", layer.named_parameters(), lr=0.1, weight_decay=1e-4)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.0001, 0.0]
    """
    _check(name, lr, weight_decay, momentum, betas)
    decay: list[Tensor] = []
    no_decay: list[Tensor] = []
    for parameter_name, parameter in named_parameters:
        if parameter.requires_grad:
            (decay if takes_decay(parameter_name, parameter) else no_decay).append(parameter)
    if not decay and not no_decay:
        raise UserError("There is nothing to train: every parameter is frozen.")
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    if name == "lars":
        return LARS(groups, lr=lr, momentum=momentum)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Tell whether weight decay applies: to matrices and kernels, not to offsets, scales or learned tokens.

    >>> takes_decay("blocks.0.attn.qkv.weight", torch.zeros(6, 2)), takes_decay("cls_token", torch.zeros(1, 1, 2))
    (True, False)
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in _OFFSETS


def scaled_lr(base: float, batch: int) -> float:
    """Return the learning rate for a global batch by the linear rule: base × batch / 256.

    >>> scaled_lr(0.3, 4096)
    4.8
    """
    if batch < 1:
        raise UserError(f"The batch size is {batch}; it must be 1 or more.")
    return base * batch / 256


def _check(name: str, lr: float, weight_decay: float, momentum: float, betas: tuple[float, float]) -> None:
    """Raise a UserError for settings no optimiser can follow."""
    if name not in OPTIMIZERS:
        raise UserError(f"Unknown optimiser {name!r}; choose one of {', '.join(OPTIMIZERS)}.")
    for setting, value in (("learning rate", lr), ("weight decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise UserError(f"The {setting} is {value}; it must be a finite number of 0 or more.")
    for setting, value in (("momentum", momentum), ("first beta", betas[0]), ("second beta", betas[1])):
        if not 0.0 <= value < 1.0:
            raise UserError(f"The {setting} of the optimiser is {value}; it must be at least 0 and below 1.")
