"""Optimizers by name, with weight decay on matrices and kernels only, or on all parameters."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

# Tokens and position embeddings of transformers: added to features like biases, so not decayed.
_NO_DECAY = frozenset(
    {"cls_token", "dist_token", "reg_token", "mask_token", "pos_embed", "relative_position_bias_table"}
)


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which the step of each weight tensor is scaled to its norm (You et al., 2017).

    For a weight p with gradient g: u = g + weight_decay · p, scaled by trust · ‖p‖ / ‖u‖ (by 1 if either norm is
    0); then mu = momentum · mu + u and p = p − lr · mu. Tensors of one dimension or none (biases, norms) are neither
    decayed nor scaled.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], *, lr: float, weight_decay: float = 0.0,
        momentum: float = 0.9, trust: float = 0.001,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim > 1:
                    update = update.add(p, alpha=group["weight_decay"])
                    p_norm, update_norm = p.norm(), update.norm()
                    ratio = group["trust"] * p_norm / update_norm
                    update = update.mul_(torch.where((p_norm > 0) & (update_norm > 0), ratio, 1.0))
                if "mu" not in self.state[p]:
                    self.state[p]["mu"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                mu = self.state[p]["mu"].mul_(group["momentum"]).add_(update)
                p.add_(mu, alpha=-group["lr"])


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    lr: float,
    weight_decay: float,
    weight_decay_on: str = "weights",
    constant_lr: Collection[str] = (),
    beta2: float = 0.999,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer "lars", "adamw" or "sgd" over the parameters that require a gradient, in the order given.

    There are two groups: weights with decay, then biases, norms, class tokens and positions without. With
    `weight_decay_on="all"` the second is empty. The parameters of modules in `constant_lr` are in two further groups
    with `constant_lr` True. `fused` updates all parameters in a few kernels, for "adamw" and "sgd" on GPUs.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = build_optimizer("sgd", layer.named_parameters(), lr=0.1, weight_decay=1e-4)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.0001, 0.0]
    """
    by_kind: dict[tuple[bool, bool], dict[str, Any]] = {
        (constant, decays): {"params": [], "weight_decay": decay, "decays": decays, "constant_lr": constant}
        for constant in ((False, True) if constant_lr else (False,))
        for decays, decay in ((True, weight_decay), (False, 0.0))
    }
    for path, parameter in named_parameters:
        if parameter.requires_grad:
            decays = weight_decay_on == "all" or takes_decay(path, parameter)
            by_kind[path.partition(".")[0] in constant_lr, decays]["params"].append(parameter)
    groups = list(by_kind.values())
    if name == "lars":
        return LARS(groups, lr=lr)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=fused or None)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused or None)


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices and kernels, not biases, scales, tokens or position embeddings.

    >>> takes_decay("blocks.0.attn.qkv.weight", torch.zeros(6, 2)), takes_decay("cls_token", torch.zeros(1, 1, 2))
    (True, False)
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in _NO_DECAY


def scaled_lr(base: float, batch: int) -> float:
    """Return the learning rate for a global batch by the linear rule: base × batch / 256.

    >>> scaled_lr(0.3, 4096)
    4.8
    """
    return base * batch / 256
