"""Projector and predictor MLPs, and the layer of prototypes.

The paper's heads are BYOL's: linear, batch norm, ReLU, linear, with 4096 hidden units and 256 outputs. MoCo v3's
projector is the other form in use: three linear layers and a final batch norm without scale and shift. MoCo v2 does
without batch norm, and DINO where the encoder does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError


def mlp(
    in_features: int,
    hidden: int = 4096,
    out: int = 256,
    *,
    layers: int = 2,
    final_bn: bool = False,
    hidden_bn: bool = True,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return an MLP (N, in_features) -> (N, out): ``layers`` linear layers, batch norm and ReLU between them.

    ``final_bn`` adds a batch norm without scale and shift after the last one; ``hidden_bn=False`` leaves out those in
    between. One layer is a plain linear map.

    >>> [type(part).__name__ for part in mlp(512, 64, 32)]
    ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    >>> [type(part).__name__ for part in mlp(512, 64, 32, layers=1, final_bn=True)]
    ['Linear', 'BatchNorm1d']
    """
    for name, value in (("in_features", in_features), ("hidden", hidden), ("out", out), ("layers", layers)):
        if value < 1:
            raise UserError(f"{name} of a head is {value}; it must be 1 or more.")
    widths = [in_features, *[hidden] * (layers - 1), out]
    parts: list[nn.Module] = []
    for depth in range(layers):
        last = depth == layers - 1
        batch_norm = final_bn if last else hidden_bn
        # A bias in front of a batch norm is subtracted again with the mean, so it would be a dead parameter.
        parts.append(nn.Linear(widths[depth], widths[depth + 1], bias=not batch_norm))
        if batch_norm:
            parts.append(nn.BatchNorm1d(widths[depth + 1], affine=not last))
        if not last:
            parts.append(nn.ReLU(inplace=True) if activation is nn.ReLU else activation())
    return nn.Sequential(*parts)


class Prototypes(nn.Module):
    """Cosines (N, P) of features (N, D) with P learned directions: a linear layer of unit rows, without bias.

    That is SwAV's layer of prototypes and DINO's weight-normalised last one. Only the rows' directions matter, so a
    weight decay, which shortens them, changes nothing.

    >>> scores = Prototypes(8, 3)(torch.randn(5, 8))
    >>> scores.shape, bool((scores.abs() <= 1 + 1e-6).all())
    (torch.Size([5, 3]), True)
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        if dim < 1 or count < 2:
            raise UserError(f"prototypes need a dim of 1 or more and a count of 2 or more, not {dim} and {count}")
        self.weight = nn.Parameter(F.normalize(torch.randn(count, dim), dim=1))

    def forward(self, features: Tensor, *, frozen: bool = False) -> Tensor:
        """`frozen` keeps the gradient from the prototypes; it is zero there rather than missing."""
        weight: Tensor = self.weight
        if frozen:  # data-parallel training waits for every parameter's gradient, so each must have one
            weight = weight.detach() + 0 * (weight - weight.detach())
        return F.normalize(features, dim=1) @ F.normalize(weight, dim=1).T
