"""SwAV: predict the prototype assignment of one view from the other, with balanced assignments over the batch.

Caron, Misra, Mairal, Goyal, Bojanowski, Joulin: "Unsupervised Learning of Visual Features by Contrasting Cluster
Assignments", NeurIPS 2020. Eq. 1 and 2 (swapped prediction) with the codes of Eq. 3, computed by Sinkhorn iterations
over the batch of all ranks (lightly's implementation). ε = 0.05 and 3 iterations as in the paper.

Not implemented: multi-crop, and the queue for batches smaller than the number of prototypes (use fewer prototypes).

x1 ── encoder ── projector ── y1 ── prototypes ── scores ┐ codes of each view are predicted
                                                          ├ from the other's softmax
x2 ── encoder ── projector ── y2 ── prototypes ── scores ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.methods.base import Method, StepOutput
from snclr.methods.common.features import at_least_float32, autocast_disabled, l2_normalize
from snclr.methods.common.heads import Prototypes
from snclr.methods.config import SwAVConfig


class SwAV(Method):
    """The mean of both swapped predictions."""

    config: SwAVConfig

    def __init__(self, encoder: nn.Module, num_features: int, config: SwAVConfig) -> None:
        from lightly.loss.swav_loss import SwaVLoss

        super().__init__(encoder, num_features, config)
        self.prototypes = Prototypes(config.dim, config.prototypes)
        self.criterion = SwaVLoss(
            temperature=config.temperature,
            sinkhorn_epsilon=0.05,
            sinkhorn_iterations=3,
            sinkhorn_gather_distributed=True,
        )

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        y = self.project(views)
        frozen = epoch < self.config.freeze_prototypes_epochs
        with autocast_disabled(y[0]):
            scores = [self.prototypes(at_least_float32(y_view), frozen=frozen) for y_view in y]
            loss = self.criterion(scores, []).squeeze(0)
        return StepOutput(loss=loss, features=l2_normalize(y[1].detach()))
