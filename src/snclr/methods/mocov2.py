"""MoCo v2: match a query with the key of the other view, with a queue of earlier keys as negatives.

Chen, Fan, Girshick, He: "Improved Baselines with Momentum Contrastive Learning", 2020. Eq. 1 (InfoNCE) in one
direction, view 1 to view 2. The projector has no batch norm. `symmetric` adds the other direction and pushes the keys
of both views, as in the CIFAR notebook of the authors; SNCLR's paper compares with that variant.

Differences from the authors' code: batch norm is synchronized over the ranks, which makes their shuffling of the batch
unnecessary. The queue starts empty instead of with noise. Entries of the query's own image are not negatives; if the
dataset is smaller than the queue, there always are some.

x1 ── encoder ── projector ── q ──────────────────┐
                                                   ├ InfoNCE of q with k and the queue
x2 ── momentum encoder ── momentum projector ── k ┘ ── pushed into the queue after the step
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.methods.base import MomentumMethod, StepOutput
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.heads import mlp
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.config import MoCoV2Config


class MoCoV2(MomentumMethod):
    """InfoNCE in one direction, or the sum of both; the queue holds all negatives."""

    config: MoCoV2Config
    queue: NeighborQueue

    def __init__(self, encoder: nn.Module, num_features: int, config: MoCoV2Config) -> None:
        super().__init__(encoder, num_features, config)
        self.queue = NeighborQueue(config.queue_length, config.dim, dtype=getattr(torch, config.queue_dtype))

    def build_projector(self, num_features: int) -> nn.Module:
        """Return a projector without batch norm."""
        c = self.config
        return mlp(num_features, c.hidden, c.dim, layers=c.projector_layers, hidden_bn=False)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of view 1 to view 2; if `symmetric`, the sum of both directions."""
        symmetric = self.config.symmetric
        keys = self.target_projections(views if symmetric else views[1:])
        queries = self.project(views if symmetric else views[:1])
        with autocast_disabled(queries[0]):
            q, k = [l2_normalize(y) for y in queries], [l2_normalize(y) for y in keys]
            negatives, own = self.queue.candidates.to(q[0].dtype), self.queue.own_entries(ids)
            losses = [
                queue_loss(query, key, negatives, own, tau=self.config.temperature)
                for query, key in zip(q, reversed(k), strict=True)
            ]
        self._to_push = torch.cat([all_gather(key) for key in k]), all_gather(ids).repeat(len(k))
        return StepOutput(loss=torch.stack(losses).sum(), features=k[-1])


def queue_loss(q: Tensor, k: Tensor, negatives: Tensor, own: tuple[Tensor, Tensor], *, tau: float) -> Tensor:
    """Eq. 1: −log [ exp(q·k/τ) / (exp(q·k/τ) + Σ_n exp(q·n/τ)) ] for normalized q, k (N, D) and negatives (Q, D).

    `own` lists the pairs (row, negative) of the same image, which are excluded. Without negatives, loss and gradient
    are 0.
    """
    positive = (q * k).sum(dim=1, keepdim=True) / tau
    excluded = torch.zeros(len(q), len(negatives), dtype=torch.bool, device=q.device)
    excluded[own] = True
    negative = (q @ negatives.T / tau).masked_fill(excluded, -torch.inf)
    return (torch.cat([positive, negative], dim=1).logsumexp(dim=1) - positive.squeeze(1)).mean()
