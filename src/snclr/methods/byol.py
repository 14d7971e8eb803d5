"""BYOL: predict the target projection of the other view, without negatives.

Grill et al.: "Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning", NeurIPS 2020. Eq. 2, the squared
distance of normalized vectors, in both directions.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ 2 − 2 cos(z1, y2)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from snclr.methods.base import MomentumMethod, StepOutput
from snclr.methods.common.features import l2_normalize, negative_cosine


class BYOL(MomentumMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        target = self.target_projections(views)
        predicted = self.predict(self.project(views))
        loss = 4 + 2 * (negative_cosine(predicted[0], target[1]) + negative_cosine(predicted[1], target[0]))
        return StepOutput(loss=loss, features=l2_normalize(target[1]))
