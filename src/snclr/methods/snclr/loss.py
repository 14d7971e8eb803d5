"""SNCLR's equations: positiveness (Eq. 4), contrastive loss (Eq. 1) and soft-neighbor loss (Eq. 2).

"Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning", ICLR 2023. The functions take
tensors only; `SoftNeighborLoss` adds the queue and works in any training loop.

Shapes: N rows on this rank, B rows over all ranks (B = N on one), K neighbors, Q queue entries, D features.
    y1 (N, D)  online projection of view 1          z1 (N, D)  predictor(y1)
    y2 (N, D)  target projection of view 2          C  (Q, D)  candidates: earlier y2, in a queue
    w  (N, K)  positiveness of each neighbor        tau        temperature
All features are L2-normalized, y2 and C carry no gradient, and a missing neighbor has index -1.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.common.features import autocast_disabled
from snclr.methods.config import LossForm, Sides, SoftNeighborConfig
from snclr.methods.snclr import kernels
from snclr.methods.snclr.kernels import Keys
from snclr.methods.snclr.queue import NeighborQueue, Neighbors

FORMS = typing.get_args(LossForm)
SIDES = typing.get_args(Sides)


def positiveness(
    y1: Tensor,
    neighbors: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float | Literal["max"] = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Eq. 4: w = softmax over the K neighbors of y1·NN_i / temperature, divided by gamma → (N, K).

    y1 is (N, D), neighbors (N, K, D). `gamma="max"` divides by the row's maximum, so its largest weight is 1.
    Missing neighbors (`mask` False) have w = 0. For learned projections pass f1(y1) and f2(neighbors).

    >>> y1, nn_ = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> positiveness(y1, nn_, gamma="max")
    tensor([[1.0000, 0.3679]])
    """
    logits = torch.einsum("nd,nkd->nk", y1, neighbors) / temperature
    mask = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # not -inf: NaN in a row without neighbors
    if gamma == "max":
        return (logits - logits.amax(dim=1, keepdim=True)).exp() * mask
    return logits.softmax(dim=1) / gamma * mask


def contrastive_loss(
    z1: Tensor, y2: Tensor, *, tau: float = 0.2, batch_y2: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Eq. 1: −log [ exp(z1·y2/τ) / Σ_m exp(z1·y2_m/τ) ], InfoNCE with the other y2 of the batch as negatives.

    `batch_y2` (B, D) is y2 of all ranks, this rank's rows included; default y2.
    """
    loss = kernels.logsumexp(z1, [Keys(y2 if batch_y2 is None else batch_y2)], tau) - (z1 * y2).sum(dim=1) / tau
    return _reduce(loss, reduction)


def soft_neighbor_loss(
    z1: Tensor,
    y2: Tensor,
    candidates: Tensor,
    index: Tensor,
    w: Tensor,
    *,
    tau: float = 0.2,
    form: str = "inside",
    sides: str = "both",
    batch_y2: Tensor | None = None,
    batch_index: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Eq. 2, with NN_0 = y2, w_0 = 1 and p_i = exp(z1·NN_i/τ) / [the y2 and the neighbors of every instance].

    form   "inside": −log Σ_i w_i p_i (the paper);  "outside": Σ_i w_i (−log p_i)
    sides  where neighbors enter: "both"; "positives" (only the row's own neighbors, in numerator and denominator);
           "negatives" (only in the denominator); "neither" (Eq. 1)
    `batch_y2` (B, D) and `batch_index` (B, K) are y2 and index of all ranks; default y2 and index.
    """
    if form not in FORMS or sides not in SIDES:
        raise UserError(f"form must be one of {FORMS} and sides one of {SIDES}, not {form!r} and {sides!r}")
    batch_y2 = y2 if batch_y2 is None else batch_y2
    batch_index = index if batch_index is None else batch_index
    if sides == "neither" or len(candidates) == 0:
        return contrastive_loss(z1, y2, tau=tau, batch_y2=batch_y2, reduction=reduction)

    own = (z1 * y2).sum(dim=1, keepdim=True) / tau  # (N, 1): i = 0
    mask = index >= 0
    neighbors = candidates[index.clamp(min=0)].to(z1.dtype)  # (N, K, D)
    near = torch.einsum("nd,nkd->nk", z1, neighbors) / tau  # (N, K): i = 1..K
    near = near.masked_fill(~mask, -torch.inf)

    if sides == "positives":  # of other instances only y2 is in the denominator
        others = kernels.logsumexp(z1, [Keys(batch_y2)], tau)
        denominator = torch.cat([others[:, None], near], dim=1).logsumexp(dim=1)
    else:  # a neighbor of several instances is computed once and counted
        count = torch.bincount(batch_index[batch_index >= 0].flatten(), minlength=len(candidates))
        picked = count.nonzero().squeeze(1)
        denominator = kernels.logsumexp(z1, [Keys(batch_y2), Keys(candidates, picked, count[picked])], tau)

    if sides == "negatives":
        return _reduce(denominator - own.squeeze(1), reduction)
    if form == "outside":
        cost = torch.where(mask, denominator[:, None] - near, 0.0)
        return _reduce(denominator - own.squeeze(1) + (w * cost).sum(dim=1), reduction)
    supports = (w > 0) & mask
    weighted = torch.where(supports, near + torch.where(supports, w, 1.0).log(), -torch.inf)
    return _reduce(denominator - torch.cat([own, weighted], dim=1).logsumexp(dim=1), reduction)


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "none"):
        raise UserError(f"reduction must be 'mean' or 'none', not {reduction!r}")
    return loss.mean() if reduction == "mean" else loss


class SoftNeighborOutput(NamedTuple):
    """Loss of one direction, with the neighbors and their positiveness for the metrics."""

    loss: Tensor  # ()
    neighbors: Neighbors
    w: Tensor  # (N, K), detached


class SoftNeighborLoss(nn.Module):
    """Neighbor search, positiveness and loss of one direction (view 1 → view 2), with the queue.

    `config` or keyword options give the settings of `SoftNeighborConfig`.

    >>> criterion = SoftNeighborLoss(dim=8, queue_length=64, neighbors=4)
    >>> y1, z1, y2, ids = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8), torch.arange(6)
    >>> loss = criterion(y1, z1, y2, ids).loss  # normalizes the features
    >>> criterion.queue.push(y2, ids)
    """

    def __init__(
        self,
        dim: int,
        queue_length: int,
        config: SoftNeighborConfig | None = None,
        *,
        queue_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = dataclasses.replace(config or SoftNeighborConfig(), **options)
        self.queue = NeighborQueue(queue_length, dim, dtype=queue_dtype)
        learned = self.config.attention == "linear"
        self.f1 = _identity_linear(dim) if learned else nn.Identity()
        self.f2 = _identity_linear(dim) if learned else nn.Identity()

    def forward(
        self,
        y1: Tensor,
        z1: Tensor,
        y2: Tensor,
        ids: Tensor,
        *,
        use_neighbors: bool = True,
        all_gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> SoftNeighborOutput:
        """Return the loss of rows y1, z1, y2 (N, D) of images `ids` (N,).

        `use_neighbors=False` gives Eq. 1; neighbors are then searched for the metrics only. `all_gather` concatenates a
        tensor over all ranks.
        """
        c = self.config
        with autocast_disabled(z1):
            dtype = torch.promote_types(z1.dtype, torch.float32)
            y1, z1, y2 = (F.normalize(y.to(dtype), dim=1) for y in (y1, z1, y2.detach()))
            candidates = self.queue.candidates
            neighbors = self.queue.search(y2, c.neighbors, ids)
            if len(candidates) == 0:
                w = torch.zeros_like(neighbors.similarity)
            else:
                query = y1 if c.attention_gradient else y1.detach()
                w = self.positiveness(query, candidates[neighbors.index.clamp(min=0)].to(dtype), neighbors.mask)
            loss = soft_neighbor_loss(
                z1, y2, candidates, neighbors.index, w, tau=c.temperature, form=c.loss_form,
                sides=c.sides if use_neighbors else "neither", batch_y2=all_gather(y2),
                batch_index=all_gather(neighbors.index),
            )  # fmt: skip
            if c.attention == "linear":
                # f1 and f2 need a gradient even in a step that does not use them, because DDP waits for it.
                loss = loss + 0 * sum(parameter.sum() for parameter in self.parameters())
        return SoftNeighborOutput(loss * 2 * c.temperature if c.times_2tau else loss, neighbors, w.detach())

    def positiveness(
        self, y1: Tensor, neighbors: Tensor, mask: Tensor, *, gamma: float | Literal["max"] | None = None
    ) -> Tensor:
        """Return w (N, K) of y1 (N, D) and neighbors (N, K, D) with this loss's settings, f1 and f2 (Eq. 4).

        `gamma` replaces the setting of that name.
        """
        c = self.config
        if c.weights == "hard":
            return mask.to(y1.dtype)
        gamma = c.gamma if gamma is None else gamma
        return positiveness(self.f1(y1), self.f2(neighbors), mask, gamma=gamma, temperature=c.attention_temperature)


def _identity_linear(dim: int) -> nn.Linear:
    """Return a linear layer initialized to the identity, the paper's choice of f1 and f2."""
    layer = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(layer.weight)
    return layer
