"""SwAV: from one view predict which prototypes the other view is assigned to, when a batch is shared out evenly.

Caron, Misra, Mairal, Goyal, Bojanowski, Joulin: "Unsupervised Learning of Visual Features by Contrasting Cluster
Assignments", NeurIPS 2020. Eq. 1 and 2 (swapped prediction), with the codes of Eq. 3 by Sinkhorn's iterations
(lightly's), over the batch of all processes. ε = 0.05 and 3 iterations are the paper's.

Two views of equal size, as every method here has: the paper's multi-crop is not built. Neither is its queue of earlier
features, which the paper uses for batches smaller than the number of prototypes: use fewer prototypes there.

x1 ── encoder ── projector ── y1 ── prototypes ── scores ┐ codes of each predict
                                                          ├ the other's softmax
x2 ── encoder ── projector ── y2 ── prototypes ── scores ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.heads import Prototypes, mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import OneBranch
from snclr.methods.features import full_precision, precise, unit


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, final_bn: bool,
    temperature: float, prototypes: int, freeze_prototypes_epochs: int,
) -> SwAV:  # fmt: skip
    """SwAV around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    return SwAV(
        encoder, projector, Prototypes(dim, prototypes), tau=temperature, freeze_epochs=freeze_prototypes_epochs
    )  # fmt: skip


class SwAV(OneBranch):
    """The mean of both swapped predictions."""

    queue = None

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        prototypes: Prototypes,
        *,
        tau: float = 0.1,
        freeze_epochs: int = 1,
    ) -> None:
        from lightly.loss.swav_loss import SwaVLoss

        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.prototypes = prototypes
        self.criterion = SwaVLoss(
            temperature=tau, sinkhorn_epsilon=0.05, sinkhorn_iterations=3, sinkhorn_gather_distributed=True
        )
        self.freeze_epochs = freeze_epochs

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S)."""
        projected = [self.projector(self.encoder(view)) for view in views]
        with full_precision(projected[0]):
            scores = [self.prototypes(precise(y), frozen=epoch < self.freeze_epochs) for y in projected]
            loss = self.criterion(scores, []).squeeze(0)
        return StepOutput(loss=loss, features=unit(projected[1].detach()))
