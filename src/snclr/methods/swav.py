"""SwAV: predict the prototype assignment of one view from the other, with balanced assignments over the batch.

Caron, Misra, Mairal, Goyal, Bojanowski, Joulin: "Unsupervised Learning of Visual Features by Contrasting Cluster
Assignments", NeurIPS 2020. Eq. 1 and 2 (swapped prediction) with the codes of Eq. 3, computed by Sinkhorn iterations
over the batch of all ranks (lightly's implementation). ε = 0.05 and 3 iterations as in the paper.

Equal shares of the prototypes need at least as many features as prototypes. A smaller batch is joined by a queue of
earlier features (`assignment_queue`), one part for each view, from epoch `assignment_queue_start` on and once it is
full. Local crops (`local_crops`) follow the two views: they predict the codes of both and have none themselves.

x1 ── encoder ── projector ── y1 ── prototypes ── scores ┐ codes of each view are predicted
                                                          ├ from the other's softmax
x2 ── encoder ── projector ── y2 ── prototypes ── scores ┘
"""

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather, rank_and_size
from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import at_least_float32, autocast_disabled, l2_normalize
from snclr.methods.common.heads import Prototypes
from snclr.methods.config import SwAVConfig


class SwAV(Method):
    """The mean of both swapped predictions.

    `earlier` (2, L, D) holds the newest features of each view first, the same on all ranks; `filled` counts them.
    """

    config: SwAVConfig
    earlier: Tensor
    filled: Tensor

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
        self._length = config.assignment_queue or 0
        if self._length:
            self.register_buffer("earlier", torch.zeros(2, self._length, config.dim))
            self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions, and of the local crops if there are some."""
        y = [self.project(view) for view in views]
        frozen = epoch < self.config.freeze_prototypes_epochs
        with autocast_disabled(y[0]):
            scores = [self.prototypes(at_least_float32(y_view), frozen=frozen) for y_view in y]
            loss = self.criterion(scores[:2], scores[2:], self._earlier_scores()).squeeze(0)
        if self._length and epoch >= self.config.assignment_queue_start:
            self._to_push = (torch.stack([all_gather(l2_normalize(y_view.detach())) for y_view in y[:2]]),)
        return StepOutput(loss=loss, features=l2_normalize(y[1].detach()))

    @torch.no_grad()
    def _earlier_scores(self) -> list[Tensor] | None:
        """Return the scores of this rank's share of the queue for each view; None until the queue is full."""
        if not self._length or int(self.filled) < self._length:
            return None
        rank, size = rank_and_size()
        return [self.prototypes(features) for features in self.earlier[:, rank::size]]

    def push(self, features: Tensor) -> None:
        """Put the features (2, B, D) of the step into the queue of both views; the oldest ones leave it."""
        joined = torch.cat([features.to(self.earlier), self.earlier], dim=1)
        self.earlier.copy_(joined[:, : self._length])
        self.filled.copy_((self.filled + features.shape[1]).clamp(max=self._length))
