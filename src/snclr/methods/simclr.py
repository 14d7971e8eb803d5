"""SimCLR: one encoder, one projector, all other views of the batch as negatives.

Chen, Kornblith, Norouzi, Hinton: "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
Eq. 1 (NT-Xent, lightly's implementation), averaged over the 2N views of the batch. The projector is that of the
authors' code: a batch norm after each layer, the last one with a scale and without a shift.

x1 ── encoder ── projector ── y1 ┐
                                  ├ NT-Xent over the 2N views of all ranks
x2 ── encoder ── projector ── y2 ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.methods.base import Method, StepOutput
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.config import SimCLRConfig


class SimCLR(Method):
    """Each view is matched with the other view of its image among all views of the batch."""

    def __init__(self, encoder: nn.Module, num_features: int, config: SimCLRConfig) -> None:
        from lightly.loss.ntx_ent_loss import NTXentLoss

        super().__init__(encoder, num_features, config)
        self.criterion = NTXentLoss(temperature=config.temperature, gather_distributed=True)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss, which is symmetric in the views."""
        y1, y2 = self.project(views)
        with autocast_disabled(y1):
            loss = self.criterion(l2_normalize(y1), l2_normalize(y2))
        return StepOutput(loss=loss, features=l2_normalize(y2.detach()))
