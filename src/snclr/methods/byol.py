"""BYOL: predict the target projection of the other view, without negatives.

Grill et al.: "Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning", NeurIPS 2020. Eq. 2, the squared
distance of normalized vectors, in both directions.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ 2 − 2 cos(z1, y2)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from torch import Tensor

from snclr.methods.base import TwoWayMethod
from snclr.methods.common.features import negative_cosine


class BYOL(TwoWayMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    def direction(self, view: Tensor, y2: Tensor) -> Tensor:
        """Return −cos(z1, y2) of a view, averaged over the batch."""
        return negative_cosine(self.predictor(self.project(view)), y2)

    def scaled(self, values: Tensor, directions: int = 1) -> Tensor:
        """Return 2 − 2 cos(z1, y2) of a direction, or the sum of both."""
        return 2 * directions + 2 * values
