"""SimCLR: one encoder, one projector, all other views of the batch as negatives.

Chen, Kornblith, Norouzi, Hinton: "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
Eq. 1 (NT-Xent), averaged over the 2N views of the batch. The projector is that of the authors' code: a batch norm after
each layer, the last one with a scale and without a shift.

x1 ── encoder ── projector ── y1 ┐
                                  ├ NT-Xent over the 2N views of all ranks
x2 ── encoder ── projector ── y2 ┘
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import all_gather_with_gradient, autocast_disabled, l2_normalize, own_rows
from snclr.methods.config import SimCLRConfig


class SimCLR(Method):
    """Each view is matched with the other view of its image among all views of the batch."""

    config: SimCLRConfig

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss, which is symmetric in the views."""
        y1, y2 = (self.project(view) for view in views)
        with autocast_disabled(y1):
            loss = nt_xent_loss(l2_normalize(y1), l2_normalize(y2), tau=self.config.temperature)
        return StepOutput(loss=loss, features=l2_normalize(y2.detach()))


def nt_xent_loss(y1: Tensor, y2: Tensor, *, tau: float) -> Tensor:
    """Eq. 1: −log [ exp(u·v/τ) / Σ_w exp(u·w/τ) ], averaged over the rows u of both views (N, D), normalized.

    v is the other view of u's image, w every view of all ranks except u. lightly's NTXentLoss selects those by a mask
    that it makes on the CPU, and the host waits for their number.
    """
    own = own_rows(y1)
    keys = [all_gather_with_gradient(y) for y in (y1, y2)]
    losses = []
    for u, same, other in ((y1, keys[0], keys[1]), (y2, keys[1], keys[0])):
        same_logits = (u @ same.T / tau).scatter(1, own[:, None], -torch.inf)
        losses.append(F.cross_entropy(torch.cat([u @ other.T / tau, same_logits], dim=1), own))
    return (losses[0] + losses[1]) / 2
