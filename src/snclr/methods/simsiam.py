"""SimSiam: predict the other view's projection, through which no gradient flows; no negatives, no momentum copy.

Chen, He: "Exploring Simple Siamese Representation Learning", CVPR 2021. Eq. 4: half the negative cosine (lightly's) of
each direction. The predictor's hidden layer is a quarter of `dim`, the bottleneck the paper found best (512 of 2048).
The paper keeps the predictor's learning rate constant; here it follows the run's schedule, as every parameter does.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ −cos(z1, y2), y2 as a constant
x2 ── encoder ── projector ── y2 ───────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import OneBranch
from snclr.methods.features import full_precision, precise, unit


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, predictor_layers: int,
    final_bn: bool,
) -> SimSiam:  # fmt: skip
    """SimSiam around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    return SimSiam(encoder, projector, mlp(dim, max(1, dim // 4), dim, layers=predictor_layers))


class SimSiam(OneBranch):
    """The total loss is half of loss(view 1 → 2) plus half of loss(view 2 → 1)."""

    queue = None

    def __init__(self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module) -> None:
        from lightly.loss.negative_cosine_similarity import NegativeCosineSimilarity

        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.criterion = NegativeCosineSimilarity()

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S)."""
        y1, y2 = (self.projector(self.encoder(view)) for view in views)
        z1, z2 = self.predictor(y1), self.predictor(y2)
        with full_precision(z1):
            forth = self.criterion(precise(z1), precise(y2.detach()))
            back = self.criterion(precise(z2), precise(y1.detach()))
        return StepOutput(loss=(forth + back) / 2, features=unit(y2.detach()))
