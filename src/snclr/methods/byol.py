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

from snclr.methods.base import Losses, StepOutput, TwoWayMethod
from snclr.methods.common.features import l2_normalize, negative_cosine


class BYOL(TwoWayMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    def losses(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> Losses:
        """Yield the loss of each direction."""
        target = self.target_projections(views)
        values: list[Tensor] = []
        for view, y2 in ((views[0], target[1]), (views[1], target[0])):
            negative = self.direction(view, y2)
            yield 2 + 2 * negative
            values.append(negative.detach())
        return StepOutput(loss=4 + 2 * (values[0] + values[1]), features=l2_normalize(target[1]))

    def direction(self, view: Tensor, y2: Tensor) -> Tensor:
        """Return −cos(z1, y2) of a view, averaged over the batch; the loss is 2 + 2 × this."""
        return negative_cosine(self.predict(self.project([view]))[0], y2)
