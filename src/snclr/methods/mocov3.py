"""MoCo v3: SNCLR's two branches without queue and neighbours.

Chen, Xie, He: "An Empirical Study of Training Self-Supervised Vision Transformers", ICCV 2021. Eq. 1 in both
directions, as in its Algorithm 1, times 2τ; the paper's "q" is our z1 and its "k+" our y2. The numbers are those of
SNCLR with `sides="neither"`: its Eq. 1 is this loss.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ contrastive loss over the batch's y2
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.distributed import gather
from snclr.ema import momentum_copy
from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import TwoBranches
from snclr.methods.features import full_precision, unit
from snclr.soft_neighbors import contrastive_loss


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, predictor_layers: int,
    final_bn: bool, temperature: float, times_2tau: bool, momentum: float, momentum_schedule: str,
) -> MoCoV3:  # fmt: skip
    """MoCo v3 around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    predictor = mlp(dim, hidden, dim, layers=predictor_layers, final_bn=final_bn)
    return MoCoV3(
        encoder, projector, predictor, tau=temperature, times_2tau=times_2tau, momentum=momentum,
        momentum_schedule=momentum_schedule,
    )  # fmt: skip


class MoCoV3(TwoBranches):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    queue = None

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        predictor: nn.Module,
        *,
        tau: float = 0.2,
        times_2tau: bool = True,
        momentum: float = 0.99,
        momentum_schedule: str = "cosine",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.momentum_encoder = momentum_copy(encoder)
        self.momentum_projector = momentum_copy(projector)
        self.tau = tau
        self.scale = 2 * tau if times_2tau else 1.0
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S)."""
        y2_of = self.keys(views)
        z1_of = [self.predictor(self.projector(self.encoder(view))) for view in views]
        with full_precision(z1_of[0]):
            loss = self._direction(z1_of[0], y2_of[1]) + self._direction(z1_of[1], y2_of[0])
        return StepOutput(loss=loss * self.scale, features=unit(y2_of[1]))

    def _direction(self, z1: Tensor, y2: Tensor) -> Tensor:
        """Eq. 1 for rows z1, y2 (N, D); the negatives are the y2 of the whole batch."""
        z1, y2 = unit(z1), unit(y2)
        return contrastive_loss(z1, y2, tau=self.tau, batch_y2=gather(y2))
