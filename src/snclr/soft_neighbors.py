"""The method on one page: the queue, Eq. 3 (search), Eq. 4 (positiveness), Eq. 1 and Eq. 2 (losses).

"Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning", ICLR 2023.
Everything here is a function of tensors and can be used in anyone's training loop.

Symbols: N rows here, B rows in the batch of all processes (B = N in one), K neighbours, Q queue entries, D dims.
    y1 (N, D)  online projection of view 1          z1 (N, D)  predictor(y1)
    y2 (N, D)  momentum projection of view 2         C  (Q, D)  candidates: earlier y2, in a first-in-first-out queue
    w  (N, K)  positiveness of each neighbour        tau        temperature
All features are L2-normalised, y2 and C carry no gradient, and a missing neighbour has index -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr import streaming
from snclr.errors import UserError
from snclr.streaming import Keys

FORMS = ("inside", "outside")
SIDES = ("both", "positives", "negatives", "neither")
WEIGHTS = ("soft", "hard")
ATTENTIONS = ("identity", "linear")


@dataclass(frozen=True)
class Neighbors:
    """The nearest candidates of each row, best first; a missing one has index -1 and similarity -inf."""

    index: Tensor  # (N, K) positions in C
    similarity: Tensor  # (N, K) cosine

    @property
    def mask(self) -> Tensor:
        """(N, K), False where fewer than K candidates existed."""
        return self.index >= 0


class NeighborQueue(nn.Module):
    """The candidate set C: the last `length` features pushed, each with its image id and age.

    It starts empty, so only real features are ever candidates, and is part of `state_dict()`, so a resumed run goes on
    with the neighbours it had. Any batch size and any length give a true first-in-first-out order.

    >>> queue = NeighborQueue(length=3, dim=2)
    >>> queue.push(torch.eye(2), ids=torch.tensor([10, 11]))
    >>> queue.search(torch.eye(2), k=2, ids=torch.tensor([10, 99])).index  # never an entry of its own image
    tensor([[ 1, -1],
            [ 1,  0]])
    """

    features: Tensor
    ids: Tensor
    births: Tensor

    def __init__(self, length: int, dim: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if length < 1 or dim < 1:
            raise UserError(f"a queue needs a length and a dim of at least 1, not length={length}, dim={dim}")
        self.register_buffer("features", torch.zeros(length, dim, dtype=dtype))
        self.register_buffer("ids", torch.full((length,), -1))
        self.register_buffer("births", torch.zeros(length, dtype=torch.int64))
        self.position = 0  # where the next feature goes
        self.count = 0  # how many entries are real: always the first `count` rows
        self.pushes = 0  # the clock that ages are measured with

    def __len__(self) -> int:
        return self.count

    @property
    def length(self) -> int:
        """The most entries it can hold (Q)."""
        return len(self.features)

    @property
    def candidates(self) -> Tensor:
        """The real entries (count, D)."""
        return self.features[: self.count]

    @torch.no_grad()
    def push(self, features: Tensor, ids: Tensor) -> None:
        """Append features (B, D) of images `ids` (B,), oldest out first; they are normalised here."""
        if features.shape != (len(ids), self.features.shape[1]):
            shapes = f"{tuple(features.shape)} and {tuple(ids.shape)}"
            raise UserError(f"push takes features (B, {self.features.shape[1]}) and ids (B,), not {shapes}")
        last = slice(max(0, len(ids) - self.length), None)  # of a batch longer than the queue only its end survives
        features = F.normalize(features[last].to(torch.promote_types(features.dtype, torch.float32)), dim=1)
        skipped = len(ids) - len(features)
        slots = (self.position + skipped + torch.arange(len(features), device=self.ids.device)) % self.length
        self.features[slots] = features.to(self.features)
        self.ids[slots] = ids[last].to(self.ids)
        self.births[slots] = self.pushes
        self.position = (self.position + len(ids)) % self.length
        self.count = min(self.length, self.count + len(ids))
        self.pushes += 1

    @torch.no_grad()
    def search(self, y2: Tensor, k: int, ids: Tensor | None = None) -> Neighbors:
        """Eq. 3 among the real entries, never returning an entry of the query's own image (`ids`)."""
        return nearest_neighbors(y2, self.candidates, k, ids=ids, candidate_ids=self.ids[: self.count])

    def ages(self, index: Tensor) -> Tensor:
        """How many pushes ago each entry came: 1 for the newest; index must be >= 0."""
        return self.pushes - self.births[index]

    def get_extra_state(self) -> Tensor:
        """The three counters, as a tensor so that any checkpoint format can hold them."""
        return torch.tensor([self.position, self.count, self.pushes])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the counters."""
        self.position, self.count, self.pushes = state.tolist()


@torch.no_grad()
def nearest_neighbors(
    y2: Tensor, candidates: Tensor, k: int, *, ids: Tensor | None = None, candidate_ids: Tensor | None = None
) -> Neighbors:
    """Eq. 3: NN(y2) = argmax over c in C of cos(y2, c), top K; entries whose id equals the row's are left out."""
    exclude = None
    if ids is not None and candidate_ids is not None:
        exclude = streaming.matching_pairs(ids.to(candidate_ids), candidate_ids)
    similarity, index = streaming.topk(y2, candidates, k, exclude=exclude)
    return Neighbors(index, similarity)


def positiveness(
    y1: Tensor,
    neighbors: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float | Literal["max"] = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Eq. 4: w = softmax over the K neighbours of y1·NN_i / temperature, divided by gamma → (N, K).

    `gamma="max"` divides by the row's largest, so that the nearest has w = 1. Missing neighbours get w = 0. For learned
    projections pass f1(y1) and f2(neighbors).

    >>> y1, nn_ = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> positiveness(y1, nn_, gamma="max")
    tensor([[1.0000, 0.3679]])
    """
    logits = torch.einsum("nd,nkd->nk", y1, neighbors) / temperature
    mask = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # finite: a row without neighbours stays finite
    if gamma == "max":
        return (logits - logits.amax(dim=1, keepdim=True)).exp() * mask
    return logits.softmax(dim=1) / gamma * mask


def contrastive_loss(
    z1: Tensor, y2: Tensor, *, tau: float = 0.2, batch_y2: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Eq. 1: −log [ exp(z1·y2/τ) / Σ_m exp(z1·y2_m/τ) ], plain InfoNCE with the batch's other y2 as negatives.

    `batch_y2` (B, D): the targets of all processes, where there are several; it must contain this one's y2.
    """
    loss = streaming.logsumexp(z1, [Keys(y2 if batch_y2 is None else batch_y2)], tau) - (z1 * y2).sum(dim=1) / tau
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
    """Eq. 2, with NN_0 = y2, w_0 = 1 and p_i = exp(z1·NN_i/τ) / [the y2 and the neighbours of every instance].

    form   "inside": −log Σ_i w_i p_i (the paper);  "outside": Σ_i w_i (−log p_i)
    sides  where neighbours enter: "both"; "positives" (numerator and the row's own terms); "negatives" (numerator is y2
           alone); "neither" (Eq. 1)
    `batch_y2` (B, D) and `batch_index` (B, K) are those of all processes, where there are several.
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

    if sides == "positives":  # the other instances are there with their y2 only
        others = streaming.logsumexp(z1, [Keys(batch_y2)], tau)
        denominator = torch.cat([others[:, None], near], dim=1).logsumexp(dim=1)
    else:  # a candidate picked by several instances is summed once, with its count
        count = torch.bincount(batch_index[batch_index >= 0].flatten(), minlength=len(candidates))
        picked = count.nonzero().squeeze(1)
        denominator = streaming.logsumexp(z1, [Keys(batch_y2), Keys(candidates, picked, count[picked])], tau)

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


@dataclass(frozen=True, kw_only=True)
class SoftNeighborSettings:
    """Every choice of the method; the defaults are the paper's text. `PRESETS` names the sets."""

    neighbors: int = 30
    """K: how many neighbours support each image."""
    tau: float = 0.2
    """Temperature of the loss."""
    form: str = "inside"
    """Where the weights stand: "inside" the logarithm (the paper) or "outside" (the authors' public code)."""
    sides: str = "both"
    """Where neighbours enter: "both", "positives", "negatives" or "neither"."""
    gamma: float | Literal["max"] = 1.0
    """Divides the weights; "max" scales the nearest to 1."""
    weights: str = "soft"
    """"soft": positiveness by attention; "hard": every neighbour counts fully (the paper's ablation)."""
    attention: str = "identity"
    """f1 and f2 of Eq. 4: "identity", or "linear" for learned projections."""
    attention_temperature: float = 1.0
    """Divides the attention logits; below 1 sharpens the weights."""
    attention_gradient: bool = False
    """Whether the gradient flows through the weights into y1."""
    times_2tau: bool = False
    """Multiply the loss by 2τ, as the authors' public code does."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, allowed in (("form", FORMS), ("sides", SIDES), ("weights", WEIGHTS), ("attention", ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.gamma != "max" and not (isinstance(self.gamma, (int, float)) and self.gamma > 0):
            raise UserError(f"gamma must be a number above 0 or 'max', not {self.gamma!r}")
        for name in ("neighbors", "tau", "attention_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if self.attention == "linear" and not self.attention_gradient:
            raise UserError("attention 'linear' learns nothing without attention_gradient; set attention_gradient=True")


PRESETS: dict[str, SoftNeighborSettings] = {
    "paper": SoftNeighborSettings(),
    "released": SoftNeighborSettings(form="outside", attention_gradient=True, times_2tau=True),
}


class SoftNeighborOutput(NamedTuple):
    """What one direction of the loss gives; all but `loss` are for looking at."""

    loss: Tensor  # ()
    neighbors: Neighbors
    w: Tensor  # (N, K)


class SoftNeighborLoss(nn.Module):
    """Search, positiveness and loss of one direction (view 1 → view 2), over a queue it owns.

    >>> criterion = SoftNeighborLoss(dim=8, queue_length=64, neighbors=4)
    >>> y1, z1, y2, ids = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8), torch.arange(6)
    >>> loss = criterion(y1, z1, y2, ids).loss  # features are normalised inside
    >>> criterion.queue.push(y2, ids)
    """

    def __init__(
        self,
        dim: int,
        queue_length: int,
        settings: SoftNeighborSettings | None = None,
        *,
        queue_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = dataclasses.replace(settings or SoftNeighborSettings(), **options)
        self.queue = NeighborQueue(queue_length, dim, dtype=queue_dtype)
        learned = self.settings.attention == "linear"
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
        gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> SoftNeighborOutput:
        """Loss of rows y1, z1, y2 (N, D) of images `ids` (N,).

        `use_neighbors=False` gives Eq. 1 (the first m epochs), the neighbours being searched for display alone.
        `gather` concatenates a tensor over all processes.
        """
        s = self.settings
        with torch.autocast(
            device_type=z1.device.type, enabled=False
        ):  # cosines and their exponentials want full precision
            precise = torch.promote_types(z1.dtype, torch.float32)
            y1, z1, y2 = (F.normalize(t.to(precise), dim=1) for t in (y1, z1, y2.detach()))
            candidates = self.queue.candidates
            neighbors = self.queue.search(y2, s.neighbors, ids)
            w = self._weights(y1, candidates, neighbors)
            loss = soft_neighbor_loss(
                z1, y2, candidates, neighbors.index, w, tau=s.tau, form=s.form,
                sides=s.sides if use_neighbors else "neither", batch_y2=gather(y2), batch_index=gather(neighbors.index),
            )  # fmt: skip
            if s.attention == "linear":
                # Where no neighbour is weighed (an empty queue, Eq. 1) they still need a gradient: DDP waits for it.
                loss = loss + 0 * sum(part.sum() for part in self.parameters())
        return SoftNeighborOutput(loss * 2 * s.tau if s.times_2tau else loss, neighbors, w.detach())

    def _weights(self, y1: Tensor, candidates: Tensor, neighbors: Neighbors) -> Tensor:
        s, mask = self.settings, neighbors.mask
        if s.weights == "hard" or len(candidates) == 0:
            return mask.to(y1.dtype)
        y1 = y1 if s.attention_gradient else y1.detach()
        keys = self.f2(candidates[neighbors.index.clamp(min=0)].to(y1.dtype))
        return positiveness(self.f1(y1), keys, mask, gamma=s.gamma, temperature=s.attention_temperature)


def _identity_linear(dim: int) -> nn.Linear:
    """A learned projection that starts as the identity, so that learning starts from the paper's choice."""
    layer = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(layer.weight)
    return layer
