"""Weighted k-nearest-neighbour classification, as the field reports it (Wu et al., 2018): no training, no choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr import streaming
from snclr.distributed import gather_rows, rank_and_size
from snclr.errors import UserError
from snclr.evaluate.resume import Interrupted, Kept, stop_together
from snclr.evaluate.scoring import check_classes, describe_sets, labelled, top_shares, true_ranks
from snclr.progress import Progress
from snclr.train.signals import StopRequest

# Rows searched for and voted on at once: at 1,000 classes and float64 the votes are 2 MB.
_VOTE_ROWS = 256


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
    device: torch.device | str | None = None,
    data: str | None = None,
    kept: Kept | None = None,
    stop: StopRequest | None = None,
    quiet: bool = True,
) -> KnnResult:
    """Class of each test feature by a vote of its k nearest training features, weighted by exp(cosine / temperature).

    Exact, in blocks: no more than 128 MB of similarities at once. A k above the size of the training set is lowered to
    it, and `protocol` says so. Rows with label -1 are left out. `leave_one_out`: train and test are the same set, and
    no image is its own neighbour. `data` says what the two sets are, for the protocol. The search is done on `device`
    (default: where the features are), and shared by the processes where there are several. `stop` ends it with
    Interrupted; a call with the same `kept` goes on.

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
    where = torch.device(device or train.device)
    votes = _Votes(
        F.normalize(queries.features.float(), dim=1), queries.labels.cpu(),
        F.normalize(keys.features.float(), dim=1).to(where), keys.labels.cpu(), k, temperature, leave_one_out,
    )  # fmt: skip
    ranks, predictions = votes.count(kept, stop, quiet=quiet or rank_and_size()[0] > 0)
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


@dataclass
class _Votes:
    """Queries (n, d) and keys (m, d) of length 1, with their classes."""

    queries: Tensor
    truth: Tensor
    keys: Tensor
    classes: Tensor
    k: int
    temperature: float
    leave_one_out: bool

    def count(self, kept: Kept | None, stop: StopRequest | None, *, quiet: bool) -> tuple[Tensor, Tensor]:
        """Rank of the true class (n,) and prediction (n,). Each round, every process takes some blocks of rows.

        The blocks are the same for any number of processes, and so is the order of every sum.
        """
        n, (rank, size) = len(self.truth), rank_and_size()
        blocks = -(-n // _VOTE_ROWS)
        done = torch.empty(0, 2, dtype=torch.int64)
        with Progress("kNN", total=n, quiet=quiet) as progress:
            found = None if kept is None else kept.load("votes", progress.say)
            if found is not None:
                done = found.tensors["votes"]
                progress.done = len(done)
            for block in range(-(-len(done) // _VOTE_ROWS), blocks, size):
                rows = range(min((block + rank) * _VOTE_ROWS, n), min((block + rank + 1) * _VOTE_ROWS, n))
                part = torch.stack(self._vote(rows), dim=1) if len(rows) else done[:0]
                done = torch.cat([done, gather_rows(part.to(self.keys.device)).cpu()])
                progress.update(len(done) - progress.done)
                _keep(kept, stop, done, len(done) == n)
        return done[:, 0].clone(), done[:, 1].clone()

    def _vote(self, rows: range) -> tuple[Tensor, Tensor]:
        part = slice(rows.start, rows.stop)
        itself = torch.arange(len(rows), device=self.keys.device)
        similarity, index = streaming.topk(
            self.queries[part].to(self.keys.device),
            self.keys,
            self.k,
            exclude=(itself, itself + rows.start) if self.leave_one_out else None,
        )
        return _vote(similarity.cpu(), self.classes[index.cpu()], self.truth[part], self.temperature)


def _keep(kept: Kept | None, stop: StopRequest | None, done: Tensor, complete: bool) -> None:
    """Save where it is time to, or where a stop was asked for, which then goes on as Interrupted."""
    try:
        stop_together(stop)
    except Interrupted:
        if kept is not None:
            kept.save("votes", len(done), {"votes": done})
        raise
    if kept is not None and kept.due and not complete:
        kept.save("votes", len(done), {"votes": done})


def _vote(similarity: Tensor, classes: Tensor, truth: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Rank of the true class (n,) and prediction (n,), from the neighbours' cosines and classes (n, k)."""
    # Relative to the nearest, whose weight is 1: the outcome is the same, and no temperature overflows. In float64, on
    # the CPU, the order in which equal weights are summed decides nothing.
    weight = ((similarity - similarity[:, :1]).double() / temperature).exp()
    width = int(torch.maximum(classes.max(), truth.max())) + 1
    votes = torch.zeros(len(weight), width, dtype=torch.float64).scatter_add_(1, classes, weight)
    return true_ranks(votes, truth), votes.argmax(dim=1)  # the first of equals


def _lowered(asked: int, k: int) -> str:
    return "" if k == asked else f" ({asked} asked for, lowered to the number of training images)"
