"""Find images to look at before training: near-duplicates, leaks, outliers, suspect labels, a diverse subset.

The functions take L2-normalized features (n, D) and only report; nothing is deleted. `format_list` names the images
found in a list file, which `--data` and `finetune --labels` read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.datasets.base import ImageDataset
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, OnProgress
from snclr.methods.common import kernels

VOTE_TEMPERATURE = 0.07
"""Weights of the vote are exp(cosine / temperature), as in the kNN evaluation."""
MAX_PAIRS = 200_000
_ROWS = 1024


class Suspect(NamedTuple):
    """An image whose neighbors vote for another class."""

    row: int
    voted: int
    """The class with the most votes."""
    share: float
    """Share of the vote for that class."""
    own_share: float
    """Share of the vote for the image's own label."""


class Leak(NamedTuple):
    """A test image that a training image is similar to; rows of the test and of the training images."""

    test: int
    train: int
    cosine: float


def similar_pairs(features: Tensor, threshold: float) -> Tensor:
    """Find all pairs of rows (p, 2) with a cosine of at least `threshold`; in blocks. UserError above 200,000 pairs.

    >>> similar_pairs(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 0.9).tolist()
    [[0, 2]]
    """
    found, count = [], 0
    for start in range(0, len(features), _ROWS):
        block = features[start : start + _ROWS]
        cosine = block @ features[start:].T  # each pair once: columns from this block on
        pairs = (cosine >= threshold).triu(diagonal=1).nonzero()
        count += len(pairs)
        if count > MAX_PAIRS:
            raise UserError(
                f"more than {MAX_PAIRS:,} pairs have a cosine of at least {threshold:g}; give a higher threshold"
            )
        found.append(pairs + start)
    return torch.cat(found)


def duplicate_groups(pairs: Tensor, n: int) -> list[list[int]]:
    """Join pairs (p, 2) of n rows to groups (connected components), the largest group first; rows ascend.

    >>> duplicate_groups(torch.tensor([[0, 1], [1, 4]]), 5)
    [[0, 1, 4]]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(pairs)), tuple(pairs.T.numpy())), shape=(n, n))
    _, component = connected_components(edges, directed=False)
    groups: dict[int, list[int]] = {}
    for row in torch.unique(pairs).tolist():
        groups.setdefault(int(component[row]), []).append(row)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def leaks(train: Tensor, test: Tensor, threshold: float) -> list[Leak]:
    """Find the test images that have a training image of at least this cosine, with the nearest, most similar first.

    >>> leaks(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), 0.9)
    [Leak(test=0, train=1, cosine=1.0)]
    """
    cosine, nearest = kernels.topk(test, train, 1)
    found = map(Leak, range(len(test)), nearest[:, 0].tolist(), cosine[:, 0].tolist())
    return sorted((leak for leak in found if leak.cosine >= threshold), key=lambda leak: -leak.cosine)


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


def diverse_subset(features: Tensor, n: int, report: OnProgress = lambda done, total: None) -> tuple[Tensor, Tensor]:
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


def format_list(dataset: ImageDataset, reasons: Mapping[int, str], header: Iterable[str]) -> str:
    """Return the text of a list file: the images with these indices, each below its reason, unless that is empty.

    Files are written with their absolute path. An image without a file of its own is written by its key, which only
    `finetune --labels` reads. A name that no list can hold (line breaks, TAB, bytes that are not UTF-8) is a comment.
    """
    lines = [f"# {_one_line(text)}" for text in header]
    if any(dataset.file(index) is None for index in reasons):
        lines.append("# These images have no files of their own: use the list with snclr finetune --labels.")
    for index, reason in reasons.items():
        if reason:
            lines.append(f"# {_one_line(reason)}")
        file = dataset.file(index)
        name = dataset.key(index) if file is None else str(file.absolute())
        fits = "\t" not in name and len(name.splitlines()) == 1 and name[0] != "#"
        fits = fits and name == name.strip().encode(errors="replace").decode()  # UTF-8
        unlisted = f"# not listed, its name does not fit on a line: {_one_line(dataset.key(index))}"
        lines.append(name if fits else unlisted)
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Escape everything that would end a comment line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
