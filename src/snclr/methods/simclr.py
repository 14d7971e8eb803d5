"""SimCLR: one encoder, one projector, every other view of the batch as a negative.

Chen, Kornblith, Norouzi, Hinton: "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
Eq. 1 (NT-Xent), as lightly computes it, averaged over the 2N views of the batch. The projector has batch norms as in
the authors' code. The paper's stronger colours and its LARS belong to views and optimiser, which are the run's.

x1 ── encoder ── projector ── y1 ┐
                                  ├ NT-Xent over the 2N views of all processes
x2 ── encoder ── projector ── y2 ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import OneBranch
from snclr.methods.features import full_precision, unit


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, final_bn: bool,
    temperature: float,
) -> SimCLR:  # fmt: skip
    """SimCLR around an encoder of that many features."""
    return SimCLR(encoder, mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn), tau=temperature)


class SimCLR(OneBranch):
    """Each view must find the other of its image among all views of the batch."""

    queue = None

    def __init__(self, encoder: nn.Module, projector: nn.Module, *, tau: float = 0.1) -> None:
        from lightly.loss.ntx_ent_loss import NTXentLoss

        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.criterion = NTXentLoss(temperature=tau, gather_distributed=True)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """The loss of views (N, 3, S, S)."""
        y1, y2 = (self.projector(self.encoder(view)) for view in views)
        with full_precision(y1):
            loss = self.criterion(unit(y1), unit(y2))
        return StepOutput(loss=loss, features=unit(y2.detach()))
