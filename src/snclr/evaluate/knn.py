"""Weighted k-nearest-neighbour classification, as the field reports it (Wu et al., 2018): no training, no choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr import streaming
from snclr.errors import UserError
from snclr.evaluate.scoring import check_classes, describe_sets, labelled, top_shares, true_ranks

# Rows voted on at once: at 1,000 classes and float64 the votes are 8 MB.
_VOTE_ROWS = 1024


@dataclass(frozen=True)
class KnnResult:
    """Accuracies in [0, 1]; `top5` is None with five classes or fewer."""

    top1: float
    top5: float | None
    k: int
    temperature: float
    protocol: str
    predictions: Tensor
    """(n,) the class each labelled test image was given, on the CPU."""


@torch.no_grad()
def knn(
    train: Tensor,
    train_labels: Tensor | None,
    test: Tensor,
    test_labels: Tensor | None,
    *,
    k: int = 200,
    temperature: float = 0.07,
    leave_one_out: bool = False,
    data: str | None = None,
) -> KnnResult:
    """Class of each test feature by a vote of its k nearest training features, weighted by exp(cosine / temperature).

    Exact, in blocks: no more than 128 MB of similarities at once. A k above the size of the training set is lowered to
    it, and `protocol` says so. Rows with label -1 are left out. `leave_one_out`: train and test are the same set, and
    no image is its own neighbour. `data` says what the two sets are, for the protocol.

    >>> train, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> knn(train, labels, torch.tensor([[2.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]), k=2).top1
    1.0
    """
    if k < 1 or not temperature > 0:
        raise UserError(f"k is {k} and the temperature {temperature}; k must be at least 1, the temperature above 0")
    if leave_one_out and train.shape != test.shape:
        raise UserError("leave_one_out compares a set with itself: give the same features as train and as test")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"training features {tuple(train.shape)} and test features {tuple(test.shape)} differ in width; "
            "take both from the same encoder"
        )
    keys, queries = labelled(train, train_labels, "training"), labelled(test, test_labels, "test")
    classes, known = check_classes(keys.labels, queries.labels)
    asked, k = k, min(k, len(keys.labels) - int(leave_one_out))
    itself = torch.arange(len(queries.labels), device=test.device)
    similarity, index = streaming.topk(
        F.normalize(queries.features.float(), dim=1),
        F.normalize(keys.features.float(), dim=1),
        k,
        exclude=(itself, itself) if leave_one_out else None,
    )
    ranks, predictions = _vote(similarity.cpu(), keys.labels.cpu()[index.cpu()], queries.labels.cpu(), temperature)
    ranks[~known.cpu()] = len(classes)  # a class that no training image has cannot be right, whatever the tie
    top1, top5 = top_shares(ranks, len(classes))
    protocol = f"kNN: cosine, weighted vote, k = {k}{_lowered(asked, k)}, temperature {temperature:g}; "
    if leave_one_out:
        protocol += "each image by all the others, "
    tested = None if leave_one_out else len(queries.labels)
    left_out = keys.left_out + (0 if leave_one_out else queries.left_out)
    protocol += describe_sets(len(keys.labels), tested, len(classes), left_out=left_out, data=data)
    if unknown := int((~known).sum()):
        protocol += f"; {unknown:,} test images of classes without a training image count as wrong"
    return KnnResult(top1, top5, k, temperature, protocol, predictions)


def _vote(similarity: Tensor, classes: Tensor, truth: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Rank of the true class (n,) and prediction (n,), from the neighbours' cosines and classes (n, k)."""
    ranks, predictions = torch.empty_like(truth), torch.empty_like(truth)
    width = int(torch.maximum(classes.max(), truth.max())) + 1
    for start in range(0, len(truth), _VOTE_ROWS):
        rows = slice(start, start + _VOTE_ROWS)
        # Relative to the nearest, whose weight is 1: the outcome is the same, and no temperature overflows. In float64,
        # on the CPU, the order in which equal weights are summed decides nothing.
        weight = ((similarity[rows] - similarity[rows, :1]).double() / temperature).exp()
        votes = torch.zeros(len(weight), width, dtype=torch.float64).scatter_add_(1, classes[rows], weight)
        ranks[rows] = true_ranks(votes, truth[rows])
        predictions[rows] = votes.argmax(dim=1)  # the first of equals
    return ranks, predictions


def _lowered(asked: int, k: int) -> str:
    return "" if k == asked else f" ({asked} asked for, lowered to the number of training images)"
