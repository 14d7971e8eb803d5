"""MoCo v2: match a query with the key of the other view, with a queue of earlier keys as negatives.

Chen, Fan, Girshick, He: "Improved Baselines with Momentum Contrastive Learning", 2020. Eq. 1 (InfoNCE) in one
direction, view 1 to view 2. The projector has no batch norm. `symmetric` adds the other direction and pushes the keys
of both views, as in the CIFAR notebook of the authors; SNCLR's paper compares with that variant.
Also MoCo v1 (`moco`): a linear projector and τ = 0.07.

Differences from the authors' code: batch norm is synchronized over the ranks, which makes their shuffling of the batch
unnecessary. The queue starts empty instead of with noise. Entries of the query's own image are not negatives; if the
dataset is smaller than the queue, there always are some.

x1 ── encoder ── projector ── q ──────────────────┐
                                                   ├ InfoNCE of q with k and the queue
x2 ── momentum encoder ── momentum projector ── k ┘ ── pushed into the queue after the step
"""

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.methods.base import Losses, StepOutput, TwoWayMethod, Views
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.config import MoCoV2Config


class MoCoV2(TwoWayMethod):
    """InfoNCE in one direction, or the sum of both; the queue holds all negatives."""

    config: MoCoV2Config
    queue: NeighborQueue
    projector_bn = False

    def __init__(self, encoder: nn.Module, num_features: int, config: MoCoV2Config) -> None:
        super().__init__(encoder, num_features, config)
        self.loss_parts = 2 if config.symmetric else 1

    def losses(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> Losses:
        """Yield the loss of view 1 to view 2; if `symmetric`, also that of view 2 to view 1."""
        keys = self.target_projections(views if self.config.symmetric else views[1:])
        with autocast_disabled(keys[0]):
            keys = [l2_normalize(key) for key in keys]
        own = self.queue.own_entries(ids)
        values: list[Tensor] = []
        for view, key in zip(views[: self.loss_parts], reversed(keys), strict=True):
            loss = self.direction(view, key, self.queue.candidates, own)
            yield loss
            values.append(loss.detach())
        self._to_push = torch.cat([all_gather(key) for key in keys]), all_gather(ids).repeat(len(keys))
        return StepOutput(loss=torch.stack(values).sum(), features=keys[-1])

    def direction(self, view: Tensor, key: Tensor, candidates: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a view with the normalized keys of the other view and of the queue."""
        query = self.project(view)
        with autocast_disabled(query):
            q = l2_normalize(query)
            return queue_loss(q, key, candidates.to(q.dtype), own, tau=self.config.temperature)


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
