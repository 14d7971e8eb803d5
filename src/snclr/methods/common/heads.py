"""Projector and predictor MLPs, and the prototype layer.

SNCLR's heads are BYOL's: linear, batch norm, ReLU, linear without bias, with 4096 hidden units and 256 outputs.
MoCo v3's projector ends with a batch norm without scale and shift, SimCLR's with one that has a scale. Those of MoCo v1
and v2, PIRL and DetCo have no batch norm, and neither has DINO's on an encoder without batch norm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(
    in_features: int,
    hidden: int = 4096,
    out: int = 256,
    *,
    layers: int = 2,
    final_bn: bool = False,
    final_scale: bool = False,
    hidden_bn: bool = True,
    final_bias: bool = True,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return an MLP (N, in_features) → (N, out) of `layers` linear layers, with batch norm and ReLU between them.

    `final_bn` adds a batch norm without scale and shift at the end, `final_scale` gives it a scale; `hidden_bn=False`
    omits those between the layers. `final_bias=False` omits the bias of the last layer. No layers: the identity.
    """
    widths = [in_features, *[hidden] * (layers - 1), out]
    parts: list[nn.Module] = []
    for depth in range(layers):
        last = depth == layers - 1
        batch_norm = final_bn if last else hidden_bn
        # A batch norm subtracts the mean and with it the bias of the layer before.
        bias = not batch_norm and (final_bias or not last)
        parts.append(nn.Linear(widths[depth], widths[depth + 1], bias=bias))
        if batch_norm:
            parts.append(nn.BatchNorm1d(widths[depth + 1], affine=not last or final_scale))
            if last and final_scale:
                parts[-1].bias.requires_grad_(False)  # torch has no batch norm with a scale alone
        if not last:
            parts.append(nn.ReLU(inplace=True) if activation is nn.ReLU else activation())
    return nn.Sequential(*parts)


class Prototypes(nn.Module):
    """Cosine similarity (N, P) of features (N, D) to P learned prototypes: a linear layer with unit-length rows.

    This is SwAV's prototype layer and DINO's weight-normalized last layer. The scores do not depend on the length of a
    row. Weight decay still has an effect: it shortens the rows, and a step of the optimizer turns a short row further.
    `learned_scale` multiplies each score by a learned factor, which starts at 1 (DINO without `norm_last_layer`).
    """

    def __init__(self, dim: int, count: int, *, learned_scale: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(count, dim), dim=1))
        self.scale = nn.Parameter(torch.ones(count)) if learned_scale else None

    def forward(self, features: Tensor, *, frozen: bool = False) -> Tensor:
        """Return the scores (N, P). `frozen` makes the gradient of the prototypes zero, but not None."""
        weight = _frozen(self.weight) if frozen else self.weight
        scores = F.normalize(features, dim=1) @ F.normalize(weight, dim=1).T
        if self.scale is None:
            return scores
        return scores * (_frozen(self.scale) if frozen else self.scale)


def _frozen(parameter: Tensor) -> Tensor:
    """Return the parameter with a zero gradient: on several ranks every parameter needs one."""
    return parameter.detach() + 0 * (parameter - parameter.detach())
