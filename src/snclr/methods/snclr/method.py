"""SNCLR: soft neighbors of the target projection, found in a queue, support the positive (Eq. 2 in both directions).

"Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning", ICLR 2023. The equations are in
`loss.py`. Differences from the released code with preset "paper": weights inside the logarithm, no gradient through the
positiveness, no factor 2τ, two-layer heads, constant momentum. The queue starts empty and is shared by all ranks.

x1 ── encoder ── projector ── y1 ── predictor ── z1 ┐
                                                     ├ loss (soft neighbors of y2 from the queue)
x2 ── momentum encoder ── momentum projector ── y2 ─┘
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.methods.base import Losses, StepOutput, TwoWayMethod
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.gate import COMPARED_NEIGHBORS, AgreementGate
from snclr.methods.common.queue import NeighborQueue, Neighbors, also_found
from snclr.methods.config import SNCLRConfig
from snclr.methods.snclr.loss import SoftNeighborLoss, SoftNeighborOutput


class SNCLR(TwoWayMethod):
    """The total loss is loss(view 1 → 2) + loss(view 2 → 1)."""

    config: SNCLRConfig

    def __init__(self, encoder: nn.Module, num_features: int, config: SNCLRConfig) -> None:
        super().__init__(encoder, num_features, config)
        queue_dtype = getattr(torch, config.queue_dtype)
        search_dim = num_features if config.search_space == "encoder" else None
        self.criterion = SoftNeighborLoss(
            config.dim, config.queue_length, config, queue_dtype=queue_dtype, search_dim=search_dim
        )
        self._to_count: tuple[Tensor, Tensor, int] | None = None  # the arguments of `gate.add`
        has_gate = config.min_agreement > 0 and config.search_view == "augmented"
        self.gate = AgreementGate(config.min_agreement) if has_gate else None

    @property
    def queue(self) -> NeighborQueue:  # type: ignore[override]  # part of the criterion, so read-only
        """The candidate set C."""
        return self.criterion.queue

    @torch.no_grad()
    def _target_features(self, views: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the target projections (N, D) of each view, and the features by which it is searched.

        A function of its own, so that the encoder's features are freed before the losses if nothing searches them.
        """
        encoded = [self.encode_target(view) for view in views]
        projected = [self.momentum_projector(features) for features in encoded]
        return projected, encoded if self.config.search_space == "encoder" else projected

    def losses(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> Losses:
        """Yield the loss of each direction. With search_view "plain", the third view is the plain one."""
        c = self.config
        target, search = self._target_features(views)
        found_ids: list[Tensor] = []  # of the neighbors of each view, used or not; empty with one search
        if c.search_view == "plain":
            neighbors = [self.criterion.search(search[2], ids)] * 2
        else:
            own = None if c.unique_neighbors else self.queue.own_entries(ids)
            k = c.neighbors if self.gate is None else max(c.neighbors, COMPARED_NEIGHBORS)
            found = [self.criterion.search(search[view], ids, k=k, own_entries=own) for view in (0, 1)]
            found_ids = [self.queue.ids_and_ages(of_view)[0] for of_view in found]
            neighbors = [of_view.nearest(c.neighbors) for of_view in found]
            if c.agreeing_neighbors:
                k_ids = [of_view[:, : c.neighbors] for of_view in found_ids]
                neighbors = [neighbors[a].keep(also_found(k_ids[a], k_ids[1 - a])) for a in (0, 1)]
        gate_is_open = self.gate is None or self.gate.is_open(epoch)
        use_neighbors = gate_is_open and self.settings_use_neighbors(epoch)
        outputs: list[SoftNeighborOutput] = []
        for a, b in ((0, 1), (1, 0)):
            output = self.direction(views[a], target[b], neighbors[b], target[a], use_neighbors)
            yield output.loss
            outputs.append(output._replace(loss=output.loss.detach()))
        self._to_count = None if self.gate is None else (found_ids[1], found_ids[0], epoch)
        self._to_push = self._gather_to_push(target, search, ids)
        one_to_two, two_to_one = outputs
        neighbor_ids, neighbor_ages = self.queue.ids_and_ages(one_to_two.neighbors)
        return StepOutput(
            loss=one_to_two.loss + two_to_one.loss,
            features=l2_normalize(target[1]),
            neighbor_ids=neighbor_ids,
            found_ids=found_ids[1] if found_ids else None,
            other_found_ids=found_ids[0] if found_ids else None,
            neighbor_ages=neighbor_ages,
            similarity=one_to_two.neighbors.similarity,
            positiveness=one_to_two.w,
            pulled=None if one_to_two.pulled is None else one_to_two.pulled.to(one_to_two.w.dtype),
        )

    def settings_use_neighbors(self, epoch: int) -> bool:
        """Return whether the settings let neighbors into the loss of this epoch; the gate may still keep them out."""
        return self.config.sides != "neither" and epoch >= self.config.neighbor_free_epochs

    def direction(
        self, view: Tensor, y2: Tensor, neighbors: Neighbors, same_view: Tensor, use_neighbors: bool
    ) -> SoftNeighborOutput:
        """Return the loss of a view with the target projections y2 of the other view and their neighbors.

        `same_view` are the target projections of the view itself. The steps are those of `SoftNeighborLoss.forward`,
        called here so that a compiled direction has only one graph break.
        """
        criterion = self.criterion
        sides = criterion.config.sides if use_neighbors else "neither"
        y1 = self.project(view)
        z1 = self.predictor(y1)
        with autocast_disabled(z1):
            y1, z1, y2 = (l2_normalize(y) for y in (y1, z1, y2))
            w = criterion.weights(y1, neighbors)
            logits = criterion.logits(z1, y2, neighbors.index, sides, same_view, all_gather)
            return criterion.combine(logits, w, neighbors, sides)

    def after_step(self, step: int, total_steps: int) -> None:
        """Count the agreeing neighbors, then update the target network and the queue."""
        if self.gate is not None and self._to_count is not None:
            self.gate.add(*self._to_count)
        super().after_step(step, total_steps)

    def disable_compile(self) -> None:
        """Exclude the logits, whose shapes depend on the selected neighbors."""
        self.criterion.logits = torch.compiler.disable(self.criterion.logits)  # type: ignore[method-assign,no-untyped-call]

    def _gather_to_push(self, target: list[Tensor], search: list[Tensor], ids: Tensor) -> tuple[Tensor, ...]:
        """Return what `after_step` pushes into the queue: features and ids of all ranks."""
        c = self.config
        pushed = [2] if c.search_view == "plain" else [1, 0] if c.push == "both" else [1]
        features, all_ids = torch.cat([all_gather(target[v]) for v in pushed]), all_gather(ids).repeat(len(pushed))
        if c.search_space != "encoder":
            return features, all_ids
        return features, all_ids, torch.cat([all_gather(search[v]) for v in pushed])
