"""MoCo v2: a query must find the other view's key among a queue of earlier keys.

Chen, Fan, Girshick, He: "Improved Baselines with Momentum Contrastive Learning", 2020. Its Eq. 1 (InfoNCE), from view 1
to view 2 alone; the projector has no batch norm, as there.

Three things differ from the authors' code. Batch norm is synchronised over the processes where there are several; their
shuffling of the batch, which keeps keys and queries from sharing one device's statistics, is thereby not needed. The
queue starts empty, and what is missing is no negative. And an entry of the query's own image, known by its id, is left
out of the negatives: in a set of images smaller than the queue there would always be one.

x1 ── encoder ── projector ── q ┐
                                 ├ InfoNCE: q must find k among k and the queue
x2 ── momentum encoder ── momentum projector ── k ┘ ── after the step, into the queue
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.distributed import gather
from snclr.ema import momentum_copy
from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import TwoBranches
from snclr.methods.features import full_precision, unit
from snclr.soft_neighbors import NeighborQueue
from snclr.streaming import matching_pairs


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, temperature: float,
    queue_length: int, queue_dtype: str, momentum: float, momentum_schedule: str,
) -> MoCoV2:  # fmt: skip
    """MoCo v2 around an encoder of that many features."""
    projector = mlp(features, hidden, dim, layers=projector_layers, hidden_bn=False)
    queue = NeighborQueue(queue_length, dim, dtype=getattr(torch, queue_dtype))
    return MoCoV2(
        encoder, projector, queue, tau=temperature, momentum=momentum, momentum_schedule=momentum_schedule
    )  # fmt: skip


class MoCoV2(TwoBranches):
    """One direction, with the queue as the only negatives."""

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        queue: NeighborQueue,
        *,
        tau: float = 0.2,
        momentum: float = 0.999,
        momentum_schedule: str = "constant",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.momentum_encoder = momentum_copy(encoder)
        self.momentum_projector = momentum_copy(projector)
        self.queue = queue
        self.tau = tau
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule
        self._to_push: tuple[Tensor, Tensor] | None = None

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """The loss of views (N, 3, S, S) of images `ids` (N,)."""
        (k,) = self.keys(views[1:])
        q = self.projector(self.encoder(views[0]))
        with full_precision(q):
            q, k = unit(q), unit(k)
            negatives = self.queue.candidates.to(q.dtype)
            own = matching_pairs(ids.to(self.queue.ids), self.queue.ids[: len(self.queue)])
            loss = queue_loss(q, k, negatives, own, tau=self.tau)
        self._to_push = gather(k), gather(ids)
        return StepOutput(loss=loss, features=k)

    def finish_step(self, step: int, total_steps: int) -> None:
        """Move the momentum networks and push the step's keys into the queue."""
        super().finish_step(step, total_steps)
        assert self._to_push is not None, "finish_step follows a forward pass"
        self.queue.push(*self._to_push)
        self._to_push = None


def queue_loss(q: Tensor, k: Tensor, negatives: Tensor, own: tuple[Tensor, Tensor], *, tau: float) -> Tensor:
    """Eq. 1: −log [ exp(q·k/τ) / (exp(q·k/τ) + Σ_n exp(q·n/τ)) ] for unit rows q, k (N, D) and negatives (Q, D).

    `own` are the (row, negative) pairs to leave out. Without negatives the loss is 0, and so is its gradient.
    """
    positive = (q * k).sum(dim=1, keepdim=True) / tau
    left_out = torch.zeros(len(q), len(negatives), dtype=torch.bool, device=q.device)
    left_out[own] = True
    negative = (q @ negatives.T / tau).masked_fill(left_out, -torch.inf)
    return (torch.cat([positive, negative], dim=1).logsumexp(dim=1) - positive.squeeze(1)).mean()
