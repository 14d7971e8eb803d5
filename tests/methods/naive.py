"""The equations of the paper as plain loops: the reference for the tests of the fast code."""

import math

import torch
from torch import Tensor


def search(
    y2: Tensor, candidates: Tensor, k: int, ids: list[int], candidate_ids: list[int], unique: bool = False
) -> list[list[int]]:
    """Eq. 3, one query at a time: indices of the k nearest candidates of other images, best first.

    With `unique`, only the last candidate of each image counts; candidates are in the order of their pushes.
    """
    rows = []
    for n in range(len(y2)):
        others = [c for c in range(len(candidates)) if candidate_ids[c] != ids[n]]
        if unique:
            others = [c for c in others if candidate_ids[c] not in candidate_ids[c + 1 :]]
        others.sort(key=lambda c: -float(y2[n] @ candidates[c]))
        rows.append(others[:k])
    return rows


def positiveness(
    y1: Tensor, candidates: Tensor, picks: list[int], gamma: float | str, temperature: float
) -> list[Tensor]:
    """Eq. 4 for one row: w_1..w_K of the candidates `picks`."""
    if not picks:
        return []
    exps = [torch.exp((y1 @ candidates[c]) / temperature) for c in picks]
    total = torch.stack(exps).sum()
    soft = [e / total for e in exps]
    scale = torch.stack(soft).max() if gamma == "max" else gamma
    return [w / scale for w in soft]


def contrastive_row(z1: Tensor, y2: Tensor, n: int, tau: float) -> Tensor:
    """Eq. 1 for row n."""
    terms = [torch.exp(z1[n] @ y2[m] / tau) for m in range(len(y2))]
    return -torch.log(terms[n] / torch.stack(terms).sum())


def soft_neighbor_row(
    z1: Tensor,
    y2: Tensor,
    candidates: Tensor,
    picks: list[list[int]],
    w: list[Tensor],
    n: int,
    tau: float,
    form: str,
    sides: str,
    same_view: Tensor | None = None,
) -> Tensor:
    """Eq. 2 for row n, instance by instance and neighbor by neighbor; `same_view` has more negatives, one per row."""
    own = [torch.exp(z1[n] @ y2[n] / tau)] + [torch.exp(z1[n] @ candidates[c] / tau) for c in picks[n]]
    denominator = own[0] if sides in ("neither", "other-negatives") else torch.stack(own).sum()
    for m in range(len(y2)):
        if m == n:
            continue
        denominator = denominator + torch.exp(z1[n] @ y2[m] / tau)
        if same_view is not None:
            denominator = denominator + torch.exp(z1[n] @ same_view[m] / tau)
        if sides in ("both", "negatives", "other-negatives"):
            for c in picks[m]:
                if sides == "other-negatives" and c in picks[n]:
                    continue
                denominator = denominator + torch.exp(z1[n] @ candidates[c] / tau)
    weights = [torch.ones_like(own[0]), *w]
    if sides not in ("both", "positives"):
        return -torch.log(own[0] / denominator)
    if form == "inside":
        return -torch.log(sum(wi * e for wi, e in zip(weights, own, strict=True)) / denominator)
    return sum(wi * -torch.log(e / denominator) for wi, e in zip(weights, own, strict=True))


def pulling_weights(
    z1: Tensor,
    y2: Tensor,
    candidates: Tensor,
    picks: list[list[int]],
    w: list[Tensor],
    n: int,
    tau: float,
    sides: str,
    same_view: Tensor | None = None,
) -> list[Tensor]:
    """Weights of row n that are at least 1.1 · count · min(1, numerator / denominator without its neighbors)."""
    with torch.no_grad():
        exps = [torch.exp(z1[n] @ candidates[c] / tau) for c in picks[n]]
        own = torch.exp(z1[n] @ y2[n] / tau)
        numerator = own + sum(wi * e for wi, e in zip(w, exps, strict=True))
        others = own
        for m in range(len(y2)):
            if m != n:
                keys = [y2[m]] + ([] if same_view is None else [same_view[m]])
                if sides == "both":
                    keys += [candidates[c] for c in picks[m] if c not in picks[n]]
                others = others + sum(torch.exp(z1[n] @ key / tau) for key in keys)
        count = [1 if sides == "positives" else sum(c in row for row in picks) for c in picks[n]]
        least = [1.1 * k * torch.clamp(numerator / others, max=1) for k in count]
    return [torch.maximum(wi, low) for wi, low in zip(w, least, strict=True)]


def snclr_loss(
    y1: Tensor, z1: Tensor, y2: Tensor, candidates: Tensor, picks: list[list[int]], *,
    tau: float, form: str, sides: str, gamma: float | str, temperature: float, gradient: bool, hard: bool = False,
    same_view: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The mean of Eq. 2 over the batch, with the weights of Eq. 4."""
    rows = []
    for n in range(len(z1)):
        query = y1[n] if gradient else y1[n].detach()
        w = positiveness(query, candidates, picks[n], 1.0 if gamma == "pull" else gamma, temperature)
        w = [torch.ones_like(wi) for wi in w] if hard else w
        arguments = (z1, y2, candidates, picks)
        if gamma == "pull" and not hard and sides in ("both", "positives"):
            w = pulling_weights(*arguments, w, n, tau, sides, same_view)
        rows.append(soft_neighbor_row(*arguments, w, n, tau, form, sides, same_view))
    return torch.stack(rows).mean()


def effective_rank(features: list[list[float]]) -> float:
    """exp of the entropy of the normalized singular values of the centered features."""
    x = torch.tensor(features, dtype=torch.float64)
    values = torch.linalg.svdvals(x - x.mean(dim=0))
    p = [float(v) / float(values.sum()) for v in values]
    return math.exp(-sum(q * math.log(q) for q in p if q > 0))
