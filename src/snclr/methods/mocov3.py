"""MoCo v3: online and target network as in SNCLR, without queue and neighbors.

Chen, Xie, He: "An Empirical Study of Training Self-Supervised Vision Transformers", ICCV 2021. Eq. 1 in both directions
as in Algorithm 1, times 2τ. The paper's q is z1 here, its k+ is y2. As in the authors' code, a ResNet has a projector
of two layers with a final batch norm, a predictor without one and τ = 1; a ViT has three layers, both with a final
batch norm, and τ = 0.2. With equal heads, momentum schedule and `times_2tau`, it equals SNCLR with `sides="neither"`.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ contrastive loss over the batch's y2
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

import torch
from torch import Tensor

from snclr.distributed.collectives import all_gather
from snclr.methods.base import TwoWayMethod
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.config import MoCoV3Config
from snclr.methods.snclr.loss import contrastive_loss


class MoCoV3(TwoWayMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    config: MoCoV3Config

    def direction(self, view: Tensor, y2: Tensor) -> Tensor:
        """Return the loss of a view with the target projections y2 of the other."""
        predicted = self.predictor(self.project(view))
        with autocast_disabled(predicted):
            return self._loss(l2_normalize(predicted), y2)

    def _loss(self, z1: Tensor, y2: Tensor) -> Tensor:
        y2 = l2_normalize(y2)
        return contrastive_loss(z1, y2, tau=self.config.temperature, batch_y2=all_gather(y2))

    def disable_compile(self) -> None:
        """Exclude the contrastive loss, which gathers the batch of all ranks."""
        self._loss = torch.compiler.disable(self._loss)  # type: ignore[method-assign,no-untyped-call]

    def scaled(self, values: Tensor, directions: int = 1) -> Tensor:
        """Return the values, times 2τ with `times_2tau`."""
        return values * 2 * self.config.temperature if self.config.times_2tau else values
