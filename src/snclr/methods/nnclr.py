"""NNCLR: the positive of a view is the nearest neighbour of the other view among earlier features.

Dwibedi, Aytar, Tompson, Sermanet, Zisserman: "With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning
of Visual Representations", ICCV 2021. Eq. 3 in both directions, each halved as in its pseudo-code. One encoder; the
queue holds its projections of the first view.

Two things are ours, as in SNCLR: the queue starts empty, and a view without a neighbour yet keeps its own projection;
and an image is never its own neighbour, which the ids in the queue rule out. The queue is one for all processes.

x1 ── encoder ── projector ── y1 ── nearest in the queue ── NN(y1) ┐
                                                                    ├ InfoNCE: NN(y1) must find z2 among the batch's z
x2 ── encoder ── projector ── y2 ── predictor ── z2 ───────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed import gather, rank_and_size
from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import OneBranch
from snclr.methods.features import full_precision, gather_with_gradient, unit
from snclr.soft_neighbors import NeighborQueue, Neighbors


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, predictor_layers: int,
    final_bn: bool, temperature: float, queue_length: int, queue_dtype: str,
) -> NNCLR:  # fmt: skip
    """NNCLR around an encoder of that many features; the predictor is twice as wide, as the paper's (4096 to 2048)."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    predictor = mlp(dim, 2 * hidden, dim, layers=predictor_layers)
    queue = NeighborQueue(queue_length, dim, dtype=getattr(torch, queue_dtype))
    return NNCLR(encoder, projector, predictor, queue, tau=temperature)


class NNCLR(OneBranch):
    """The total loss is half of loss(view 1 → 2) plus half of loss(view 2 → 1)."""

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module, queue: NeighborQueue, *, tau: float = 0.1
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.queue = queue
        self.tau = tau
        self._to_push: tuple[Tensor, Tensor] | None = None

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S) of images `ids` (N,)."""
        projected = [self.projector(self.encoder(view)) for view in views]
        predicted = [self.predictor(y) for y in projected]
        with full_precision(projected[0]):
            y1, y2 = (unit(y.detach()) for y in projected)
            z1, z2 = (unit(z) for z in predicted)
            found = self.queue.search(y1, 1, ids)
            forth = neighbor_loss(self._neighbor(y1, found), z2, tau=self.tau)
            back = neighbor_loss(self._neighbor(y2, self.queue.search(y2, 1, ids)), z1, tau=self.tau)
        self._to_push = gather(y1), gather(ids)
        index = found.index.clamp(min=0)
        return StepOutput(
            loss=(forth + back) / 2,
            features=y1,
            neighbor_ids=self.queue.ids[index].where(found.mask, -1),
            neighbor_ages=self.queue.ages(index),
            similarity=found.similarity,
            positiveness=found.mask.to(y1.dtype),
        )

    def _neighbor(self, y: Tensor, found: Neighbors) -> Tensor:
        """NN(y, Q) for each row of y (N, D), or the row itself where the queue has none for it."""
        if len(self.queue) == 0:
            return y
        nearest = self.queue.candidates[found.index[:, 0].clamp(min=0)].to(y.dtype)
        return torch.where(found.mask, nearest, y)

    def finish_step(self, step: int, total_steps: int) -> None:
        """Push the step's keys into the queue."""
        assert self._to_push is not None, "finish_step follows a forward pass"
        self.queue.push(*self._to_push)
        self._to_push = None


def neighbor_loss(nearest: Tensor, z: Tensor, *, tau: float) -> Tensor:
    """Eq. 3: −log [ exp(NN_i·z_i/τ) / Σ_k exp(NN_i·z_k/τ) ] for unit rows (N, D); k runs over the whole batch."""
    logits = nearest @ gather_with_gradient(z).T / tau  # (N, B)
    own = torch.arange(len(z), device=z.device) + rank_and_size()[0] * len(z)
    return F.cross_entropy(logits, own)
