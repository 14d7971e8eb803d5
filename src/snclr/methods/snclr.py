"""SNCLR: two encoders, two projectors, one predictor, a queue, and Eq. 2 in both directions.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ loss (soft neighbours of y2 from the queue)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed import gather
from snclr.ema import momentum_copy
from snclr.heads import mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import TwoBranches
from snclr.soft_neighbors import NeighborQueue, SoftNeighborLoss, SoftNeighborSettings


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, predictor_layers: int,
    final_bn: bool, queue_length: int, queue_dtype: str, momentum: float, momentum_schedule: str, push: str,
    neighbor_free_epochs: int, **choices: object,
) -> SNCLR:  # fmt: skip
    """SNCLR around an encoder of that many features; `choices` are those of `soft_neighbor_settings`."""
    projector = mlp(features, hidden, dim, layers=projector_layers, final_bn=final_bn)
    predictor = mlp(dim, hidden, dim, layers=predictor_layers, final_bn=final_bn)
    settings = soft_neighbor_settings(**choices)  # type: ignore[arg-type]
    criterion = SoftNeighborLoss(dim, queue_length, settings, queue_dtype=getattr(torch, queue_dtype))
    return SNCLR(
        encoder, projector, predictor, criterion, momentum=momentum, momentum_schedule=momentum_schedule, push=push,
        neighbor_free_epochs=neighbor_free_epochs,
    )  # fmt: skip


def soft_neighbor_settings(
    *, neighbors: int, temperature: float, loss_form: str, sides: str, gamma: float | str, weights: str, attention: str,
    attention_temperature: float, attention_gradient: bool, times_2tau: bool,
) -> SoftNeighborSettings:  # fmt: skip
    """The choices of the loss, from the settings of a run."""
    divisor: float | Literal["max"] = "max" if isinstance(gamma, str) else gamma
    return SoftNeighborSettings(
        neighbors=neighbors, tau=temperature, form=loss_form, sides=sides, gamma=divisor, weights=weights,
        attention=attention, attention_temperature=attention_temperature, attention_gradient=attention_gradient,
        times_2tau=times_2tau,
    )  # fmt: skip


class SNCLR(TwoBranches):
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

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S) of images `ids` (N,)."""
        y2_of = self.keys(views)
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
        super().finish_step(step, total_steps)
        assert self._to_push is not None, "finish_step follows a forward pass"
        self.queue.push(*self._to_push)
        self._to_push = None
