"""MoCo v3: online and target network as in SNCLR, without queue and neighbors.

Chen, Xie, He: "An Empirical Study of Training Self-Supervised Vision Transformers", ICCV 2021. Eq. 1 in both directions
as in Algorithm 1, times 2τ. The paper's q is z1 here, its k+ is y2. As in the authors' code, a ResNet has a projector
of two layers with a final batch norm, a predictor without one and τ = 1; a ViT has three layers, both with a final
batch norm, and τ = 0.2. With equal heads, momentum schedule and `times_2tau`, it equals SNCLR with `sides="neither"`.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ contrastive loss over the batch's y2
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from snclr.distributed.collectives import all_gather
from snclr.methods.base import MomentumMethod, StepOutput
from snclr.methods.common.contrastive import contrastive_loss
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.config import MoCoV3Config


class MoCoV3(MomentumMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    config: MoCoV3Config

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        tau = self.config.temperature
        target = self.target_projections(views)
        predicted = self.predict(self.project(views))
        with autocast_disabled(predicted[0]):
            z, y = [l2_normalize(z) for z in predicted], [l2_normalize(y) for y in target]
            loss = contrastive_loss(z[0], y[1], tau=tau, batch_y2=all_gather(y[1]))
            loss = loss + contrastive_loss(z[1], y[0], tau=tau, batch_y2=all_gather(y[0]))
        return StepOutput(loss=loss * 2 * tau if self.config.times_2tau else loss, features=y[1])
