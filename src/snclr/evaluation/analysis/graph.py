"""The exact neighbor graph of a set of features, and what follows from it for each image.

Shapes: n images, D features (L2-normalized rows), k neighbors. An index (n, k) has -1 if a row has fewer neighbors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.methods.common import kernels
from snclr.methods.common.queue import also_found

_ROWS = 1024
OnProgress = Callable[[int, int], None]
"""Called with the number of finished and of all rows; it may raise to cancel."""


@dataclass(frozen=True)
class Graph:
    """The k nearest neighbors of each image, nearest first: cosine (n, k) and row (n, k)."""

    cosine: Tensor
    index: Tensor


def neighbor_graph(features: Tensor, k: int, report: OnProgress = lambda done, total: None) -> Graph:
    """Find the k rows with the largest cosine to each row (n, D), without the row itself.

    >>> neighbor_graph(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), 1).index.tolist()
    [[1], [0], [1]]
    """
    unit = F.normalize(features.float(), dim=1)
    k = max(1, min(k, len(unit) - 1))
    cosine, index = torch.empty(len(unit), k), torch.empty(len(unit), k, dtype=torch.int64)
    for start in range(0, len(unit), _ROWS):
        stop = min(start + _ROWS, len(unit))
        own = torch.arange(stop - start)
        cosine[start:stop], index[start:stop] = kernels.topk(unit[start:stop], unit, k, exclude=(own, own + start))
        report(stop, len(unit))
    return Graph(cosine, index)


def hubness(index: Tensor) -> Tensor:
    """Return how often each image is among the k neighbors of another: counts (n,) int64, k on average.

    >>> hubness(torch.tensor([[1], [0], [1]])).tolist()
    [1, 2, 0]
    """
    return torch.bincount(index[index >= 0], minlength=len(index))


def purity(index: Tensor, labels: Tensor) -> Tensor:
    """Return the share of each image's neighbors that have its class (n,); NaN if its class or all theirs is unknown.

    `labels` (n,) has -1 for an unknown class.

    >>> purity(torch.tensor([[1, 2], [0, 2], [0, 1]]), torch.tensor([0, 0, -1])).tolist()
    [1.0, 1.0, nan]
    """
    near = labels[index.clamp(min=0)]
    known = (index >= 0) & (near >= 0) & (labels >= 0)[:, None]
    same = known & (near == labels[:, None])
    return same.sum(dim=1).float() / known.sum(dim=1).float()


def mutual(index: Tensor) -> Tensor:
    """Return whether each neighbor of an image has that image among its own neighbors (n, k); False for -1."""
    blocks = zip(torch.split(index, _ROWS), torch.split(torch.arange(len(index)), _ROWS), strict=True)
    found = [(index[near.clamp(min=0)] == own[:, None, None]).any(dim=2) & (near >= 0) for near, own in blocks]
    return torch.cat(found)


def reciprocity(index: Tensor) -> Tensor:
    """Return the share of each image's neighbors that have it among their own neighbors (n,).

    It needs no labels. Neighbors that are not mutual are more often of another class.

    >>> reciprocity(torch.tensor([[1], [0], [1]])).tolist()
    [1.0, 1.0, 0.0]
    """
    return mutual(index).sum(dim=1).float() / (index >= 0).sum(dim=1).clamp(min=1)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return overlap@k of two neighbor lists (n, k) of the same images: the share of common neighbors (n,).

    >>> overlap(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).tolist()
    [0.5]
    """
    blocks = zip(torch.split(one, _ROWS), torch.split(other, _ROWS), strict=True)
    return torch.cat([also_found(a, b) for a, b in blocks]).sum(dim=1) / max(1, one.shape[1])
