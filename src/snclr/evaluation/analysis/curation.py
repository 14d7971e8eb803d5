"""Find images to look at before training: near-duplicates, leaks, outliers, suspect labels, a diverse subset.

Every function takes L2-normalized features (n, D) and only reports; nothing is deleted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, Report
from snclr.methods.common import kernels

VOTE_TEMPERATURE = 0.07
"""Weights of the vote are exp(cosine / temperature), as in the kNN evaluation."""
MAX_PAIRS = 200_000
_ROWS = 1024


class Pairs(NamedTuple):
    """Pairs of similar images, most similar first: rows `one` and `other` (p,) and their cosine (p,).

    Within one set, `one` < `other`; of a leak, `one` is the test row and `other` the training row.
    """

    one: Tensor
    other: Tensor
    cosine: Tensor


class Suspect(NamedTuple):
    """An image whose neighbors vote for another class."""

    row: int
    voted: int
    """The class with the most votes."""
    share: float
    """Share of the vote for that class."""
    own_share: float
    """Share of the vote for the image's own label."""


def similar_pairs(features: Tensor, threshold: float) -> Pairs:
    """Find all pairs with a cosine of at least `threshold`; exact, in blocks. UserError above 200,000 pairs.

    >>> similar_pairs(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 0.9).other.tolist()
    [2]
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    for start in range(0, len(features), _ROWS):
        block = features[start : start + _ROWS]
        cosine = block @ features[start:].T  # each pair once: columns from this block on
        row, column = (cosine >= threshold).nonzero(as_tuple=True)
        once = column > row
        row, column = row[once], column[once]
        count += len(row)
        if count > MAX_PAIRS:
            raise UserError(
                f"more than {MAX_PAIRS:,} pairs have a cosine of at least {threshold:g}; give a higher threshold"
            )
        found.append((row + start, column + start, cosine[row, column]))
    one, other, value = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = value.argsort(descending=True, stable=True)
    return Pairs(one[order], other[order], value[order])


def duplicate_groups(pairs: Pairs, n: int) -> list[list[int]]:
    """Join pairs of n rows to groups (connected components), the largest group first; rows ascend.

    >>> duplicate_groups(Pairs(torch.tensor([0, 1]), torch.tensor([1, 4]), torch.tensor([0.99, 0.98])), 5)
    [[0, 1, 4]]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(pairs.one)), (pairs.one.numpy(), pairs.other.numpy())), shape=(n, n))
    _, component = connected_components(edges, directed=False)
    groups: dict[int, list[int]] = {}
    for row in torch.unique(torch.cat([pairs.one, pairs.other])).tolist():
        groups.setdefault(int(component[row]), []).append(row)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def leaks(train: Tensor, test: Tensor, threshold: float) -> Pairs:
    """Find the test images that have a training image of at least this cosine: (test row, nearest training row).

    >>> leaks(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), 0.9).other.tolist()
    [1]
    """
    cosine, nearest = kernels.topk(test, train, 1)
    rows = (cosine[:, 0] >= threshold).nonzero()[:, 0]
    order = rows[cosine[rows, 0].argsort(descending=True, stable=True)]
    return Pairs(order, nearest[order, 0], cosine[order, 0])


def outlier_scores(graph: Graph) -> Tensor:
    """Return 1 − the mean cosine to the k nearest neighbors (n,): large for an image unlike all others."""
    return 1 - graph.cosine.clamp(min=-1).mean(dim=1)


def suspect_labels(graph: Graph, labels: Tensor) -> list[Suspect]:
    """List the labeled images whose k neighbors vote for another class, the clearest first (leave-one-out kNN).

    `labels` (n,) has -1 for an unknown class; such images neither vote nor are listed.
    """
    near = labels[graph.index.clamp(min=0)]
    known = (graph.index >= 0) & (near >= 0)
    weight = torch.where(known, ((graph.cosine - 1) / VOTE_TEMPERATURE).exp(), 0.0).double()
    votes = torch.zeros(len(labels), int(labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, near.clamp(min=0), weight)
    total = votes.sum(dim=1)
    votes = votes / total.clamp(min=1e-300)[:, None]
    share, voted = votes.max(dim=1)
    own = votes.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    rows = ((labels >= 0) & (total > 0) & (voted != labels)).nonzero()[:, 0]
    order = rows[(share - own)[rows].argsort(descending=True, stable=True)]
    return [Suspect(row, int(voted[row]), float(share[row]), float(own[row])) for row in order.tolist()]


def diverse_subset(features: Tensor, n: int, report: Report = lambda done, total: None) -> tuple[Tensor, Tensor]:
    """Choose n images that cover the set: rows (n,) in order of choice and their cosine to those chosen before (n,).

    Greedy k-center: the image nearest to the mean first, then always the one farthest from all chosen. The first m of
    a subset are the subset of m.

    >>> diverse_subset(torch.tensor([[1.0, 0.0], [0.9, 0.43], [0.0, 1.0]]), 2)[0].tolist()
    [1, 2]
    """
    if not 1 <= n <= len(features):
        raise UserError(f"a subset of {n} images cannot be chosen from {len(features):,}; give 1 to {len(features):,}")
    first = int((features @ features.mean(dim=0)).argmax())
    rows, cosines = [first], [0.0]
    nearest = features @ features[first]
    while len(rows) < n:
        nearest[rows[-1]] = torch.inf  # never chosen twice, even among equal images
        row = int(nearest.argmin())
        rows.append(row)
        cosines.append(float(nearest[row]))
        torch.maximum(nearest, features @ features[row], out=nearest)
        if len(rows) % 64 == 0:
            report(len(rows), n)
    return torch.tensor(rows), torch.tensor(cosines)
