"""Projector and predictor MLPs.

The paper's heads are BYOL's: linear, batch norm, ReLU, linear, with 4096 hidden units and 256 outputs. MoCo v3's
projector is the other form in use: three linear layers and a final batch norm without scale and shift.
"""

from __future__ import annotations

from torch import nn

from snclr.errors import UserError


def mlp(
    in_features: int, hidden: int = 4096, out: int = 256, *, layers: int = 2, final_bn: bool = False
) -> nn.Sequential:
    """Return an MLP (N, in_features) -> (N, out): ``layers`` linear layers, batch norm and ReLU between them.

    ``final_bn`` adds a batch norm without scale and shift after the last one. One layer is a plain linear map.

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
        batch_norm = final_bn or not last
        # A bias in front of a batch norm is subtracted again with the mean, so it would be a dead parameter.
        parts.append(nn.Linear(widths[depth], widths[depth + 1], bias=not batch_norm))
        if batch_norm:
            parts.append(nn.BatchNorm1d(widths[depth + 1], affine=not last))
        if not last:
            parts.append(nn.ReLU(inplace=True))
    return nn.Sequential(*parts)
