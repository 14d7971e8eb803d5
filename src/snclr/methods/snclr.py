"""SNCLR: two encoders, two projectors, one predictor, a queue, and Eq. 2 in both directions.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ loss (soft neighbours of y2 from the queue)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed import gather
from snclr.ema import ema_update, momentum_at, momentum_copy
from snclr.methods.base import StepOutput
from snclr.soft_neighbors import NeighborQueue, SoftNeighborLoss


class SNCLR(nn.Module):
    """The paper's method. The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        predictor: nn.Module,
        criterion: SoftNeighborLoss,
        *,
        momentum: float = 0.99,
        momentum_schedule: str = "constant",
        push: str = "one",
        neighbor_free_epochs: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.momentum_encoder = momentum_copy(encoder)
        self.momentum_projector = momentum_copy(projector)
        self.criterion = criterion
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule
        self.push = push
        self.neighbor_free_epochs = neighbor_free_epochs
        self._to_push: tuple[Tensor, Tensor] | None = None

    @property
    def queue(self) -> NeighborQueue:
        """The candidate set C."""
        return self.criterion.queue

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S) of images `ids` (N,)."""
        with torch.no_grad():  # first, so that its activations are gone before the trained passes need the memory
            y2_of = [self.momentum_projector(self.momentum_encoder(view)) for view in views]
        y1_of = [self.projector(self.encoder(view)) for view in views]
        z1_of = [self.predictor(y1) for y1 in y1_of]

        use_neighbors = epoch >= self.neighbor_free_epochs
        forth = self.criterion(y1_of[0], z1_of[0], y2_of[1], ids, use_neighbors=use_neighbors, gather=gather)
        back = self.criterion(y1_of[1], z1_of[1], y2_of[0], ids, use_neighbors=use_neighbors, gather=gather)

        self._remember(y2_of, ids)
        neighbors, found = forth.neighbors, forth.neighbors.index.clamp(min=0)
        return StepOutput(
            loss=forth.loss + back.loss,
            features=F.normalize(y2_of[1].float(), dim=1),
            neighbor_ids=self.queue.ids[found].where(neighbors.mask, -1),
            neighbor_ages=self.queue.ages(found),
            similarity=neighbors.similarity,
            positiveness=forth.w,
        )

    def _remember(self, y2_of: list[Tensor], ids: Tensor) -> None:
        """Keep this batch's keys of all processes until the step is done: a query must not meet its own batch."""
        if self.push == "both":
            self._to_push = torch.cat([gather(y2_of[1]), gather(y2_of[0])]), gather(ids).repeat(2)
        else:
            self._to_push = gather(y2_of[1]), gather(ids)

    def finish_step(self, step: int, total_steps: int) -> None:
        """Move the momentum networks and push the keys of the step into the queue."""
        m = momentum_at(step, total_steps, self.momentum, self.momentum_schedule)
        ema_update(self.encoder, self.momentum_encoder, m)
        ema_update(self.projector, self.momentum_projector, m)
        assert self._to_push is not None, "finish_step follows a forward pass"
        self.queue.push(*self._to_push)
        self._to_push = None
