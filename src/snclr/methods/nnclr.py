"""NNCLR: the positive of a view is the nearest neighbor of the other view among earlier projections.

Dwibedi, Aytar, Tompson, Sermanet, Zisserman: "With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning
of Visual Representations", ICCV 2021. Eq. 3, averaged over both directions as in the pseudo-code. One encoder; the
queue holds its projections of the first view and is shared by all ranks.

Differences from the paper, as in SNCLR: the queue starts empty, and a view without a neighbor uses its own projection.
An image is never its own neighbor.

x1 ── encoder ── projector ── y1 ── nearest in the queue ── NN(y1) ┐
                                                                    ├ InfoNCE of NN(y1) with z2 over the batch's z
x2 ── encoder ── projector ── y2 ── predictor ── z2 ───────────────┘
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import all_gather_with_gradient, autocast_disabled, l2_normalize, own_rows
from snclr.methods.common.heads import mlp
from snclr.methods.common.queue import NeighborQueue, Neighbors
from snclr.methods.config import NNCLRConfig


class NNCLR(Method):
    """The total loss is the mean of loss(view 1 → 2) and loss(view 2 → 1)."""

    config: NNCLRConfig
    queue: NeighborQueue

    def build_predictor(self) -> nn.Module:
        """Return a predictor twice as wide as the projector, as in the paper (4096 and 2048)."""
        c = self.config
        return mlp(c.dim, 2 * c.hidden, c.dim, layers=c.predictor_layers, final_bias=c.final_bias)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        tau = self.config.temperature
        projections = [self.project(view) for view in views]
        predictions = [self.predictor(y) for y in projections]
        with autocast_disabled(projections[0]):
            y1, y2 = (l2_normalize(y.detach()) for y in projections)
            z1, z2 = (l2_normalize(z) for z in predictions)
            own = self.queue.own_entries(ids)
            neighbors = self.queue.search(y1, 1, exclude=own)
            loss_12 = neighbor_loss(self._nearest(y1, neighbors), z2, tau=tau)
            loss_21 = neighbor_loss(self._nearest(y2, self.queue.search(y2, 1, exclude=own)), z1, tau=tau)
        self._to_push = all_gather(y1), all_gather(ids)
        neighbor_ids, neighbor_ages = self.queue.ids_and_ages(neighbors)
        return StepOutput(
            loss=(loss_12 + loss_21) / 2,
            features=y1,
            neighbor_ids=neighbor_ids,
            neighbor_ages=neighbor_ages,
            similarity=neighbors.similarity,
            positiveness=neighbors.mask.to(y1.dtype),
        )

    def _nearest(self, y: Tensor, neighbors: Neighbors) -> Tensor:
        """Return NN(y, Q) of each row of y (N, D), or the row itself if it has no neighbor."""
        if len(self.queue) == 0:
            return y
        nearest = self.queue.candidates[neighbors.index[:, 0].clamp(min=0)].to(y.dtype)
        return torch.where(neighbors.mask, nearest, y)


def neighbor_loss(nearest: Tensor, z: Tensor, *, tau: float) -> Tensor:
    """Eq. 3: −log [ exp(NN_i·z_i/τ) / Σ_k exp(NN_i·z_k/τ) ] for normalized rows (N, D); k over all ranks."""
    logits = nearest @ all_gather_with_gradient(z).T / tau  # (N, B)
    return F.cross_entropy(logits, own_rows(z))
