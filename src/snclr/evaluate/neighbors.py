"""The nearest neighbours of chosen images, with their positiveness: the rows of the paper's neighbour figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.order import epoch_order
from snclr.data.sources import Source
from snclr.errors import UserError
from snclr.evaluate.features import Features
from snclr.soft_neighbors import nearest_neighbors, positiveness

_ROWS = 1024  # queries weighed at once


@dataclass(frozen=True)
class Neighbor:
    """One neighbour: `index` is its place among the candidates, `w` its positiveness."""

    key: str
    index: int
    cosine: float
    w: float
    label: str | None = None
    same_class: bool | None = None
    """None where a label is unknown."""


@dataclass(frozen=True)
class NeighborRow:
    """A query and its neighbours, nearest first: fewer than asked for where there were not enough candidates."""

    key: str
    index: int
    label: str | None
    neighbors: list[Neighbor]


@torch.no_grad()
def neighbor_table(
    query_features: Tensor,
    candidate_features: Tensor,
    *,
    query_keys: Sequence[str],
    candidate_keys: Sequence[str],
    query_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    query_labels: Sequence[str | None] | None = None,
    candidate_labels: Sequence[str | None] | None = None,
    attention_features: Tensor | None = None,
    k: int = 5,
    gamma: float | Literal["max"] = "max",
    temperature: float = 1.0,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> list[NeighborRow]:
    """The k nearest candidates (m, D) of each query (n, D) by cosine (Eq. 3), with w by Eq. 4.

    With ids, a query never gets a candidate of its own id. Eq. 4 compares y1 with the neighbours: give it as
    `attention_features` (n, D) where it differs from the y2 that was searched with. `gamma="max"` scales the largest w
    of a row to 1, as in the paper's figure. `weigh` replaces Eq. 4 by the caller's own: y1 (n, D), neighbours (n, K, D)
    and their mask (n, K) to w (n, K).

    >>> q, c = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    >>> (row,) = neighbor_table(q, c, query_keys=["q"], candidate_keys=["a", "b"], k=2)
    >>> [(found.key, round(found.w, 3)) for found in row.neighbors]
    [('b', 1.0), ('a', 0.368)]
    """
    if k < 1 or not temperature > 0:
        raise UserError(f"k is {k} and the temperature {temperature}; k must be at least 1, the temperature above 0")
    if query_features.shape[1:] != candidate_features.shape[1:]:
        raise UserError(
            f"query features {tuple(query_features.shape)} and candidate features {tuple(candidate_features.shape)} "
            "differ in width; take both from the same encoder"
        )
    assert len(query_keys) == len(query_features)
    assert len(candidate_keys) == len(candidate_features)
    y2, candidates = F.normalize(query_features.float(), dim=1), F.normalize(candidate_features.float(), dim=1)
    y1 = y2 if attention_features is None else F.normalize(attention_features.float(), dim=1)
    found = nearest_neighbors(y2, candidates, k, ids=query_ids, candidate_ids=candidate_ids)
    parts = []
    for start in range(0, len(y1), _ROWS):  # the neighbours' features are K times the queries'
        part = slice(start, start + _ROWS)
        near, mask = candidates[found.index[part].clamp(min=0)], found.mask[part]
        if weigh is None:
            parts.append(positiveness(y1[part], near, mask, gamma=gamma, temperature=temperature))
        else:
            parts.append(weigh(y1[part], near, mask))
    w = torch.cat([found.similarity[:0], *parts])
    rows = []
    columns = (found.index.tolist(), found.similarity.tolist(), w.tolist())
    for query, (indices, cosines, weights) in enumerate(zip(*columns, strict=True)):
        label = None if query_labels is None else query_labels[query]
        neighbors = []
        for index, cosine, weight in zip(indices, cosines, weights, strict=True):
            if index >= 0:
                other = None if candidate_labels is None else candidate_labels[index]
                same = None if label is None or other is None else label == other
                neighbors.append(Neighbor(candidate_keys[index], index, cosine, weight, other, same))
        rows.append(NeighborRow(query_keys[query], query, label, neighbors))
    return rows


def same_class_share(rows: Sequence[NeighborRow]) -> list[float | None]:
    """For each rank, the share of queries whose neighbour there has their class; None where no label is known."""
    ranks = max((len(row.neighbors) for row in rows), default=0)
    shares: list[float | None] = []
    for rank in range(ranks):
        at_rank = [row.neighbors[rank].same_class for row in rows if rank < len(row.neighbors)]
        known = [same for same in at_rank if same is not None]
        shares.append(sum(known) / len(known) if known else None)
    return shares


def pick_queries(features: Features, count: int, *, seed: int = 0) -> Tensor:
    """Positions of `count` rows to show, at random by the seed, the classes taking turns where there are labels."""
    order = torch.from_numpy(epoch_order(len(features.ids), seed, epoch=0))
    if features.labels is not None and bool((features.labels >= 0).any()):
        labels = features.labels[order]
        turn = torch.zeros_like(labels)
        for label in torch.unique(labels).tolist():
            members = labels == label
            # The unlabelled come when nothing else is left.
            turn[members] = torch.arange(int(members.sum())) + (len(labels) if label < 0 else 0)
        order = order[torch.argsort(turn * (int(labels.max()) + 2) + labels)]
    return order[:count]


def class_names(source: Source, ids: Tensor) -> list[str | None] | None:
    """Each image's class name (its number where the classes have no names), None where unknown; None without labels."""
    if source.labels is None:
        return None
    labels, classes = source.labels[ids.numpy()].tolist(), source.classes
    return [None if label < 0 else str(label) if classes is None else classes[label] for label in labels]
