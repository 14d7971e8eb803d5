"""The loss of one image taken apart: which neighbours support it, how much each is trusted, and what each contributes.

Symbols as in `soft_neighbors`, for a batch of one image: y1, z1, y2 (D,), neighbours NN_1..NN_K, and NN_0 = y2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.evaluate.neighbor_space import weigh_as_trained
from snclr.soft_neighbors import SoftNeighborLoss, nearest_neighbors, soft_neighbor_loss

VIEW = "the centre crop as both views, so that the two directions of the loss are equal"
DENOMINATORS = {
    "own": "the row's own K+1 terms, Σ_{i=0..K} exp(z1·NN_i/τ): a batch of this one image has no other instances",
    "y2": "exp(z1·y2/τ) alone: Eq. 1, in which neighbours do not enter, for a batch of this one image",
}


class Views(NamedTuple):
    """y1, z1 and y2 of one image, (1, D) each, of length 1."""

    y1: Tensor
    z1: Tensor
    y2: Tensor


@dataclass(frozen=True)
class Term:
    """One term of Eq. 2; `place` is -1 for y2 itself, else the neighbour's place among the candidates."""

    place: int
    cosine: float
    """y2·NN_i, which it was chosen by (Eq. 3)."""
    prediction: float
    """z1·NN_i, which the loss compares."""
    w: float
    """Positiveness (Eq. 4); 1 for y2."""
    p: float
    """exp(z1·NN_i/τ) over the denominator; 0 where it does not enter."""
    term: float
    """What it adds: w_i p_i inside the logarithm, or w_i (−log p_i) outside."""
    share: float
    """Its part of the sum of all terms, in [0, 1]."""


@dataclass(frozen=True)
class Explanation:
    """The loss of one direction for one image, and its terms: y2 first, then the neighbours, nearest first."""

    loss: float
    form: str
    sides: str
    tau: float
    gamma: float | str
    denominator: str
    terms: list[Term]


@torch.no_grad()
def project_views(method: nn.Module, image: Tensor) -> Views:
    """y1, z1 and y2 of one image (1, 3, S, S), by the method in evaluation mode."""
    assert not method.training, "batch norms must use what they learnt, not this one image"
    parts = {name: method.get_submodule(name) for name, _ in method.named_children()}
    y1 = parts["projector"](parts["encoder"](image))
    z1 = parts["predictor"](y1)
    y2 = parts["momentum_projector"](parts["momentum_encoder"](image))
    return Views(*(F.normalize(t.float(), dim=1) for t in (y1, z1, y2)))


@torch.no_grad()
def explain_loss(
    criterion: SoftNeighborLoss,
    views: Views,
    candidates: Tensor,
    *,
    own_id: int = -1,
    candidate_ids: Tensor | None = None,
) -> Explanation:
    """Eq. 3, 4 and 2 for one image among candidates (Q, D) of length 1; those with its own id are left out."""
    s = criterion.settings
    if len(candidates) == 0:
        raise UserError(
            "the run's queue is empty, so there are no neighbours to explain: train for a step, or give a folder of "
            "images as --candidates"
        )
    y1, z1, y2 = views
    candidates = candidates.to(y2)
    ids = None if candidate_ids is None else torch.tensor([own_id], device=y2.device)
    found = nearest_neighbors(y2, candidates, s.neighbors, ids=ids, candidate_ids=candidate_ids)
    if not bool(found.mask.any()):
        raise UserError("every candidate is the image itself, so it has no neighbours; give more images as candidates")
    w = weigh_as_trained(criterion, y1, candidates[found.index.clamp(min=0)], found.mask, gamma=s.gamma)
    loss = soft_neighbor_loss(z1, y2, candidates, found.index, w, tau=s.tau, form=s.form, sides=s.sides)
    kept = found.mask[0]
    place = found.index[0][kept]
    keys = torch.cat([y2, candidates[place]]).cpu().double()  # on the CPU: Apple's GPUs have no double precision
    prediction = keys @ z1[0].cpu().double()
    enters = torch.ones_like(prediction, dtype=torch.bool)
    enters[1:] = s.sides != "neither"
    logits = (prediction / s.tau).masked_fill(~enters, -torch.inf)
    log_p = logits - logits.logsumexp(dim=0)
    weights = torch.cat([w.new_ones(1), w[0][kept]]).cpu().double()
    positive = (
        torch.ones_like(weights) if s.sides in ("both", "positives") else F.one_hot(torch.tensor(0), len(weights))
    )
    cost = log_p.exp() if s.form == "inside" or s.sides in ("negatives", "neither") else -log_p
    term = torch.where(positive.to(weights) > 0, weights * cost, 0.0)
    share = term / term.sum() if float(term.sum()) > 0 else torch.zeros_like(term)
    columns = (
        [-1, *place.tolist()], (keys @ y2[0].cpu().double()).tolist(), prediction.tolist(), weights.tolist(),
        log_p.exp().tolist(), term.tolist(), share.tolist(),
    )  # fmt: skip
    return Explanation(
        loss=float(loss) * (2 * s.tau if s.times_2tau else 1),
        form=s.form,
        sides=s.sides,
        tau=s.tau,
        gamma=s.gamma,
        denominator=DENOMINATORS["y2" if s.sides == "neither" else "own"],
        terms=[Term(*row) for row in zip(*columns, strict=True)],
    )
