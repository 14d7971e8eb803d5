"""SNCLR: soft neighbors of the target projection, found in a queue, support the positive (Eq. 2 in both directions).

"Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning", ICLR 2023. The equations are in
`loss.py`. Differences from the released code with preset "paper": weights inside the logarithm, no gradient through the
positiveness, no factor 2τ, two-layer heads, constant momentum. The queue starts empty and is shared by all ranks.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ loss (soft neighbors of y2 from the queue)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.methods.base import MomentumMethod, StepOutput
from snclr.methods.common.features import l2_normalize
from snclr.methods.config import SNCLRConfig
from snclr.methods.snclr.loss import SoftNeighborLoss
from snclr.methods.snclr.queue import NeighborQueue


class SNCLR(MomentumMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    config: SNCLRConfig

    def __init__(self, encoder: nn.Module, num_features: int, config: SNCLRConfig) -> None:
        super().__init__(encoder, num_features, config)
        queue_dtype = getattr(torch, config.queue_dtype)
        self.criterion = SoftNeighborLoss(config.dim, config.queue_length, config, queue_dtype=queue_dtype)

    @property
    def queue(self) -> NeighborQueue:  # type: ignore[override]  # part of the criterion, so read-only
        """The candidate set C."""
        return self.criterion.queue

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions."""
        y2 = self.target_projections(views)
        y1 = self.project(views)
        z1 = self.predict(y1)

        use_neighbors = epoch >= self.config.neighbor_free_epochs
        forward, backward = (
            self.criterion(
                y1[a], z1[a], y2[b], ids, use_neighbors=use_neighbors, same_view=y2[a], all_gather=all_gather
            )
            for a, b in ((0, 1), (1, 0))
        )
        pushed = [y2[1], y2[0]] if self.config.push == "both" else [y2[1]]
        self._to_push = torch.cat([all_gather(y) for y in pushed]), all_gather(ids).repeat(len(pushed))
        neighbor_ids, neighbor_ages = self.queue.ids_and_ages(forward.neighbors)
        return StepOutput(
            loss=forward.loss + backward.loss,
            features=l2_normalize(y2[1]),
            neighbor_ids=neighbor_ids,
            neighbor_ages=neighbor_ages,
            similarity=forward.neighbors.similarity,
            positiveness=forward.w,
            pulled=None if forward.pulled is None else forward.pulled.to(forward.w.dtype),
        )
