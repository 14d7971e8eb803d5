"""SimSiam: predict the projection of the other view, with a stop-gradient; no negatives and no target network.

Chen, He: "Exploring Simple Siamese Representation Learning", CVPR 2021. Eq. 4: the mean of the negative cosines of both
directions. The hidden layer of the predictor is a quarter of `dim`, as in the paper (512 of 2048). The predictor's
learning rate is constant, as in the authors' recipe (`fix_predictor_lr`).

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ −cos(z1, stop_gradient(y2))
x2 ── encoder ── projector ── y2 ───────────────────┘
"""

from torch import Tensor, nn

from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import l2_normalize, negative_cosine
from snclr.methods.common.heads import mlp
from snclr.methods.config import SimSiamConfig


class SimSiam(Method):
    """The total loss is the mean of loss(view 1 → 2) and loss(view 2 → 1)."""

    config: SimSiamConfig

    def build_predictor(self) -> nn.Module:
        """Return the bottleneck predictor."""
        c = self.config
        return mlp(c.dim, max(1, c.dim // 4), c.dim, layers=c.predictor_layers, final_bias=c.final_bias)

    def __init__(self, encoder: nn.Module, num_features: int, config: SimSiamConfig) -> None:
        super().__init__(encoder, num_features, config)
        self.constant_lr = ("predictor",) if config.fix_predictor_lr else ()

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        y1, y2 = (self.project(view) for view in views)
        z1, z2 = self.predictor(y1), self.predictor(y2)
        loss = (negative_cosine(z1, y2.detach()) + negative_cosine(z2, y1.detach())) / 2
        return StepOutput(loss=loss, features=l2_normalize(y2.detach()))
