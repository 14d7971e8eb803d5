"""Barlow Twins: make the cross-correlation of the two views' features the identity.

Zbontar, Jing, Misra, LeCun, Deny: "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021. Eq. 1
with Eq. 2's correlation over the batch of all processes, as lightly computes it.

x1 ── encoder ── projector ── y1 ┐
                                  ├ C = correlation over the batch (D, D); Σ (1 − C_ii)² + λ Σ_{i≠j} C_ij²
x2 ── encoder ── projector ── y2 ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import OneBranch
from snclr.methods.features import full_precision, gather_with_gradient, precise, unit


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, final_bn: bool,
    redundancy_weight: float,
) -> BarlowTwins:  # fmt: skip
    """Barlow Twins around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    return BarlowTwins(encoder, projector, redundancy_weight=redundancy_weight)


class BarlowTwins(OneBranch):
    """One loss for both views: it is symmetric in them."""

    queue = None

    def __init__(self, encoder: nn.Module, projector: nn.Module, *, redundancy_weight: float = 0.005) -> None:
        from lightly.loss.barlow_twins_loss import BarlowTwinsLoss

        super().__init__()
        self.encoder = encoder
        self.projector = projector
        # Not its own gathering: that would standardise with each process's mean and variance.
        self.criterion = BarlowTwinsLoss(lambda_param=redundancy_weight, gather_distributed=False)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """The loss of views (N, 3, S, S)."""
        y1, y2 = (self.projector(self.encoder(view)) for view in views)
        with full_precision(y1):
            loss = self.criterion(gather_with_gradient(precise(y1)), gather_with_gradient(precise(y2)))
        return StepOutput(loss=loss, features=unit(y2.detach()))
