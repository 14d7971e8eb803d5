"""Barlow Twins: make the cross-correlation matrix of the two views' features the identity.

Zbontar, Jing, Misra, LeCun, Deny: "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021. Eq. 1
with the correlation of Eq. 2 over the batch of all ranks (lightly's implementation). The first term sums over D
features, the second over D² − D pairs: λ is 0.0051 at the paper's D = 8192, and larger in proportion for fewer.

x1 ── encoder ── projector ── y1 ┐
                                  ├ C = correlation over the batch (D, D); Σ (1 − C_ii)² + λ Σ_{i≠j} C_ij²
x2 ── encoder ── projector ── y2 ┘
"""

from torch import Tensor, nn

from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import all_gather_with_gradient, at_least_float32, autocast_disabled, l2_normalize
from snclr.methods.config import BarlowTwinsConfig


class BarlowTwins(Method):
    """One loss, symmetric in the two views."""

    def __init__(self, encoder: nn.Module, num_features: int, config: BarlowTwinsConfig) -> None:
        from lightly.loss.barlow_twins_loss import BarlowTwinsLoss

        super().__init__(encoder, num_features, config)
        # Features are gathered here: with gather_distributed, lightly standardizes with each rank's own statistics.
        self.criterion = BarlowTwinsLoss(lambda_param=redundancy_weight(config), gather_distributed=False)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss, which is symmetric in the views."""
        y1, y2 = (self.project(view) for view in views)
        with autocast_disabled(y1):
            loss = self.criterion(*(all_gather_with_gradient(at_least_float32(y)) for y in (y1, y2)))
        return StepOutput(loss=loss, features=l2_normalize(y2.detach()))


def redundancy_weight(config: BarlowTwinsConfig) -> float:
    """Return λ: the given number, or the authors' 0.0051 at D = 8192 scaled to `dim`.

    >>> redundancy_weight(BarlowTwinsConfig()), redundancy_weight(BarlowTwinsConfig(dim=1024))
    (0.0051, 0.0408)
    """
    return 0.0051 * 8192 / config.dim if config.redundancy_weight == "auto" else config.redundancy_weight
