"""BYOL: predict the momentum branch's projection of the other view; there are no negatives.

Grill et al.: "Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning", NeurIPS 2020. Eq. 2, the squared
distance of unit vectors, 2 − 2 cos (lightly's negative cosine), in both directions.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ 2 − 2 cos(z1, y2)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.ema import momentum_copy
from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import TwoBranches
from snclr.methods.features import full_precision, precise, unit


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, predictor_layers: int,
    final_bn: bool, momentum: float, momentum_schedule: str,
) -> BYOL:  # fmt: skip
    """BYOL around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    predictor = mlp(dim, hidden, dim, layers=predictor_layers, final_bn=final_bn)
    return BYOL(encoder, projector, predictor, momentum=momentum, momentum_schedule=momentum_schedule)


class BYOL(TwoBranches):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    queue = None

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        predictor: nn.Module,
        *,
        momentum: float = 0.996,
        momentum_schedule: str = "cosine",
    ) -> None:
        from lightly.loss.negative_cosine_similarity import NegativeCosineSimilarity

        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.momentum_encoder = momentum_copy(encoder)
        self.momentum_projector = momentum_copy(projector)
        self.criterion = NegativeCosineSimilarity()
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S)."""
        y2_of = self.keys(views)
        z1_of = [self.predictor(self.projector(self.encoder(view))) for view in views]
        with full_precision(z1_of[0]):
            forth = self.criterion(precise(z1_of[0]), precise(y2_of[1]))
            back = self.criterion(precise(z1_of[1]), precise(y2_of[0]))
        return StepOutput(loss=4 + 2 * (forth + back), features=unit(y2_of[1]))
