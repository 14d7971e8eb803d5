"""SNCLR's equations: contrastive loss (Eq. 1, also of MoCo v3), soft-neighbor loss (Eq. 2) and positiveness (Eq. 4).

"Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning", ICLR 2023. The functions take
tensors only; `SoftNeighborLoss` adds the queue and works in any training loop.

Shapes: N rows on this rank, B rows over all ranks (B = N on one), K neighbors, Q queue entries, D features.
    y1 (N, D)  online projection of view 1          z1 (N, D)  predictor(y1)
    y2 (N, D)  target projection of view 2          C  (Q, D)  candidates: earlier y2, in a queue
    w  (N, K)  positiveness of each neighbor        tau        temperature
All features are L2-normalized, y2 and C carry no gradient, and a missing neighbor has index -1.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.common import kernels
from snclr.methods.common.features import autocast_disabled, l2_normalize, own_rows
from snclr.methods.common.kernels import Keys
from snclr.methods.common.queue import NeighborQueue, Neighbors, Pairs
from snclr.methods.config import LossForm, Sides, SoftNeighborConfig
from snclr.runtime.settings import current_name

FORMS = typing.get_args(LossForm)
SIDES = typing.get_args(Sides)
PULL_MARGIN = 1.1
"""Factor by which `pulling_weights` exceeds the weight at which pull turns into push."""


def contrastive_loss(
    z1: Tensor, y2: Tensor, *, tau: float = 0.2, batch_y2: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Eq. 1: −log [ exp(z1·y2/τ) / Σ_m exp(z1·y2_m/τ) ], InfoNCE with the other y2 of the batch as negatives.

    All features are L2-normalized rows (N, D). `batch_y2` (B, D) is y2 of all ranks, this rank's rows included; default
    y2.
    """
    keys = Keys(y2 if batch_y2 is None else batch_y2)
    return reduce_rows(kernels.logsumexp(z1, [keys], tau) - (z1 * y2).sum(dim=1) / tau, reduction)


def reduce_rows(loss: Tensor, reduction: str) -> Tensor:
    """Return the mean of the losses of the rows (N,), or the losses themselves."""
    if reduction not in ("mean", "none"):
        raise UserError(f"reduction must be 'mean' or 'none', not {reduction!r}")
    return loss.mean() if reduction == "mean" else loss


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
    pull: bool = False,
    batch_y2: Tensor | None = None,
    batch_index: Tensor | None = None,
    same_view: Keys | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Eq. 2, with NN_0 = y2, w_0 = 1 and p_i = exp(z1·NN_i/τ) / Σ_c exp(z1·c/τ).

    c runs over y2 and the neighbors of every image of the batch.

    form   "inside": −log Σ_i w_i p_i (the paper);  "outside": Σ_i w_i (−log p_i)
    sides  where neighbors enter: "both"; "positives" (only the row's own neighbors, in numerator and denominator);
           "negatives" (only in the denominator); "other-negatives" (only in the denominator, without the entries
           that are neighbors of the row itself); "neither" (Eq. 1)
    pull   raise the weights of neighbors that the row would be pushed away from, see `pulling_weights`; for "inside"
    `batch_y2` (B, D) and `batch_index` (B, K) are y2 and index of all ranks; default y2 and index. `same_view` are
    further negatives: the target projections of the view itself, each row without its own.
    """
    negatives = [Keys(y2 if batch_y2 is None else batch_y2), *([] if same_view is None else [same_view])]
    batch_index = index if batch_index is None else batch_index
    logits = neighbor_logits(z1, y2, candidates, index, negatives, batch_index, tau=tau, sides=sides, pull=pull)
    return reduce_rows(weighted_loss(logits, w, form=form, sides=sides, pull=pull).rows, reduction)


class NeighborLogits(NamedTuple):
    """The logits of Eq. 2 for one direction."""

    positive: Tensor  # (N, 1) z1·y2/τ
    neighbors: Tensor  # (N, K) z1·NN_i/τ, -inf where missing
    counts: Tensor  # (N, K) how often the neighbor is in the denominator, 0 where missing
    denominator: Tensor  # (N,) log of the denominator
    others: Tensor | None = None  # (N,) log of the denominator without the row's own neighbors, for `pull`


def neighbor_logits(
    z1: Tensor,
    y2: Tensor,
    candidates: Tensor,
    index: Tensor,
    batch_keys: Sequence[Keys],
    batch_index: Tensor,
    *,
    tau: float,
    sides: str,
    pull: bool = False,
) -> NeighborLogits:
    """Return the logits of Eq. 2; the options are those of `soft_neighbor_loss`.

    `batch_keys` are y2 and further negatives of all ranks, `batch_index` (B, K) the neighbors of all ranks.
    """
    if sides not in SIDES:
        raise UserError(f"sides must be one of {SIDES}, not {sides!r}")
    positive_logit = (z1 * y2).sum(dim=1, keepdim=True) / tau  # i = 0
    mask = index >= 0
    if sides == "neither" or len(candidates) == 0:
        missing = positive_logit.new_full(index.shape, -torch.inf)
        denominator = kernels.logsumexp(z1, batch_keys, tau)
        return NeighborLogits(positive_logit, missing, torch.zeros_like(missing), denominator, denominator.detach())

    neighbors = candidates[index.clamp(min=0)].to(z1.dtype)  # (N, K, D)
    neighbor_logit = torch.einsum("nd,nkd->nk", z1, neighbors) / tau  # i = 1..K
    neighbor_logit = neighbor_logit.masked_fill(~mask, -torch.inf)
    if sides == "positives":  # of other images only y2 is in the denominator
        batch_logsumexp = kernels.logsumexp(z1, batch_keys, tau)
        denominator = torch.cat([batch_logsumexp[:, None], neighbor_logit], dim=1).logsumexp(dim=1)
        return NeighborLogits(positive_logit, neighbor_logit, mask.to(z1.dtype), denominator, batch_logsumexp.detach())

    # A neighbor of several images is computed once and counted.
    count = kernels.count_entries(batch_index, len(candidates))
    selected = count.nonzero().squeeze(1)  # the one wait for the device in a direction
    position = torch.full_like(count, -1).index_copy_(0, selected, torch.arange(len(selected), device=selected.device))
    all_neighbors = Keys(candidates, selected, count[selected])
    other_neighbors = Keys(candidates, selected, count[selected], exclude=position[index.clamp(min=0)].where(mask, -1))
    counted = other_neighbors if sides == "other-negatives" else all_neighbors
    denominator = kernels.logsumexp(z1, [*batch_keys, counted], tau)
    others = kernels.logsumexp(z1.detach(), [*batch_keys, other_neighbors], tau) if pull else None
    return NeighborLogits(
        positive_logit, neighbor_logit, count[index.clamp(min=0)].where(mask, 0).to(z1.dtype), denominator, others
    )


class WeightedLoss(NamedTuple):
    """The loss of each row, the weights it used, and which neighbors the row is pulled toward."""

    rows: Tensor  # (N,)
    w: Tensor  # (N, K)
    pulled: Tensor | None  # (N, K) bool; None if neighbors are not positives


def weighted_loss(logits: NeighborLogits, w: Tensor, *, form: str, sides: str, pull: bool = False) -> WeightedLoss:
    """Return Eq. 2 of each row from its logits and weights; the options are those of `soft_neighbor_loss`."""
    if form not in FORMS:
        raise UserError(f"form must be one of {FORMS}, not {form!r}")
    if pull and form == "outside":
        raise UserError("pull is for form 'inside', not 'outside'")
    positive, neighbors, counts, denominator, _ = logits
    if sides not in ("both", "positives"):
        return WeightedLoss(denominator - positive.squeeze(1), w, None)
    if pull:
        w = pulling_weights(logits, w)
    mask = counts > 0
    if form == "outside":
        neighbor_nll = torch.where(mask, denominator[:, None] - neighbors, 0.0)
        rows = denominator - positive.squeeze(1) + (w * neighbor_nll).sum(dim=1)
        # The gradient with respect to a neighbor's logit is count · p_i · (1 + Σ w) − w_i; negative pulls.
        threshold = (1 + w.sum(dim=1, keepdim=True)) * (neighbors - denominator[:, None]).detach().exp()
    else:
        is_positive = (w > 0) & mask
        weighted = torch.where(is_positive, neighbors + torch.where(is_positive, w, 1.0).log(), -torch.inf)
        rows = denominator - torch.cat([positive, weighted], dim=1).logsumexp(dim=1)
        threshold = (-rows.detach()).exp()[:, None]
    return WeightedLoss(rows, w, (w > counts * threshold).detach())


def pulling_weights(logits: NeighborLogits, w: Tensor) -> Tensor:
    """Raise weights w (N, K) in [0, 1] so that every row is pulled toward each of its neighbors.

        w_i ← max( w_i, 1.1 · count_i · min(1, Σ_{i=0..K} w_i exp(z1·NN_i/τ) / others) )

    `others` is the denominator without the row's own neighbors (`logits.others` is its log). For the form "inside" this
    guarantees w_i > count_i · exp(−L), which is the condition for pull; the proof is in docs/method/snclr.md.
    """
    assert logits.others is not None
    with torch.no_grad():
        numerator = torch.cat([logits.positive, logits.neighbors + w.log()], dim=1).logsumexp(dim=1)
        minimum = PULL_MARGIN * logits.counts * (numerator - logits.others).exp().clamp(max=1)[:, None]
    return torch.maximum(w, minimum)


class SoftNeighborOutput(NamedTuple):
    """Loss of one direction, with the neighbors, their positiveness and the pulled ones for the metrics."""

    loss: Tensor  # ()
    neighbors: Neighbors
    w: Tensor  # (N, K), detached
    pulled: Tensor | None  # (N, K) bool; None if neighbors are not positives


class SoftNeighborLoss(nn.Module):
    """Neighbor search, positiveness and loss of one direction (view 1 → view 2), with the queue.

    `config` or keyword options give the settings of `SoftNeighborConfig`. With `search_dim` the queue is searched by
    other features than those of the loss.

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
        search_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = dataclasses.replace(
            config or SoftNeighborConfig(), **{current_name(name): value for name, value in options.items()}
        )
        self.queue = NeighborQueue(queue_length, dim, dtype=queue_dtype, search_dim=search_dim)
        learned = self.config.attention == "linear"
        self.f1, self.f2 = (_identity_linear(dim) if learned else nn.Identity() for _ in range(2))

    @property
    def raises_weights(self) -> bool:
        """Whether the weights are raised until every neighbor is pulled."""
        return self.config.gamma == "pull" and self.config.neighbor_weights == "soft"

    def forward(
        self,
        y1: Tensor,
        z1: Tensor,
        y2: Tensor,
        ids: Tensor,
        *,
        neighbors: Neighbors | None = None,
        use_neighbors: bool = True,
        same_view: Tensor | None = None,
        all_gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> SoftNeighborOutput:
        """Return the loss of rows y1, z1, y2 (N, D) of images `ids` (N,).

        `neighbors` are entries of the queue, by default those nearest to y2. `use_neighbors=False` gives Eq. 1; the
        neighbors are then for the metrics only. `same_view` (N, D), the target projections of view 1, is needed for
        negatives "both-views". `all_gather` concatenates a tensor over all ranks.
        """
        sides = self.config.sides if use_neighbors else "neither"
        with autocast_disabled(z1):
            y1, z1, y2 = (l2_normalize(y) for y in (y1, z1, y2.detach()))
            neighbors = self.search(y2, ids) if neighbors is None else neighbors
            w = self.weights(y1, neighbors)
            logits = self.logits(z1, y2, neighbors.index, sides, same_view, all_gather)
            return self.combine(logits, w, neighbors, sides)

    def weights(self, y1: Tensor, neighbors: Neighbors) -> Tensor:
        """Return the positiveness w (N, K) of the neighbors of normalized y1 (N, D), which are entries of the queue."""
        candidates = self.queue.candidates
        if len(candidates) == 0:
            return torch.zeros_like(neighbors.similarity)
        query = y1 if self.config.attention_gradient else y1.detach()
        return self.positiveness(query, candidates[neighbors.index.clamp(min=0)].to(y1.dtype), neighbors.mask)

    def combine(self, logits: NeighborLogits, w: Tensor, neighbors: Neighbors, sides: str) -> SoftNeighborOutput:
        """Return the mean loss of the rows from their logits and weights."""
        c = self.config
        rows, w, pulled = weighted_loss(logits, w, form=c.loss_form, sides=sides, pull=self.raises_weights)
        loss = rows.mean()
        if c.attention == "linear":
            # On several ranks, f1 and f2 need a gradient even in a step that does not use them.
            loss = loss + 0 * sum(parameter.sum() for parameter in self.parameters())
        return SoftNeighborOutput(loss * 2 * c.temperature if c.times_2tau else loss, neighbors, w.detach(), pulled)

    def logits(
        self, z1: Tensor, y2: Tensor, index: Tensor, sides: str, same_view: Tensor | None,
        all_gather: Callable[[Tensor], Tensor],
    ) -> NeighborLogits:  # fmt: skip
        """Return the logits of normalized z1 and y2 with y2, the neighbors `index` and the negatives of all ranks."""
        c = self.config
        batch_keys = [Keys(all_gather(y2))]
        if c.negatives == "both-views":
            if same_view is None:
                raise UserError("negatives 'both-views' needs same_view, the target projections of view 1")
            batch = all_gather(F.normalize(same_view.to(z1.dtype), dim=1))
            batch_keys.append(Keys(batch, exclude=own_rows(z1)[:, None]))  # each row without its own image
        return neighbor_logits(
            z1, y2, self.queue.candidates, index, batch_keys, all_gather(index), tau=c.temperature, sides=sides,
            pull=self.raises_weights,
        )  # fmt: skip

    def search(
        self, query: Tensor, ids: Tensor, *, k: int | None = None, own_entries: Pairs | None = None
    ) -> Neighbors:
        """Return the k (default K) nearest entries of the queue for each feature (N, D) of images `ids` (N,) (Eq. 3).

        `own_entries` is `queue.own_entries(ids)` if it is known, for a search without unique neighbors.
        """
        with autocast_disabled(query):
            c = self.config
            return self.queue.search(
                l2_normalize(query), k or c.neighbors, ids, unique=c.unique_neighbors, exclude=own_entries
            )

    def positiveness(self, y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
        """Return w (N, K) of y1 (N, D) and neighbors (N, K, D) with this loss's settings, f1 and f2 (Eq. 4)."""
        c = self.config
        if c.neighbor_weights == "hard":
            return mask.to(y1.dtype)
        # With "pull", `weighted_loss` raises the weights when the logits are known.
        gamma = 1.0 if c.gamma == "pull" else c.gamma
        return positiveness(self.f1(y1), self.f2(neighbors), mask, gamma=gamma, temperature=c.attention_temperature)


def _identity_linear(dim: int) -> nn.Linear:
    """Return a linear layer initialized to the identity, which the paper uses for f1 and f2."""
    layer = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(layer.weight)
    return layer
