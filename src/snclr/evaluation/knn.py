"""Weighted k-nearest-neighbor classification of frozen features (Wu et al., 2018)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.distributed.collectives import all_gather_rows, rank_and_size
from snclr.errors import UserError
from snclr.evaluation.results import KnnResult
from snclr.evaluation.scoring import check_classes, describe_sets, labeled, match_labels, top_shares, true_ranks
from snclr.evaluation.session import Session, open_target
from snclr.evaluation.state import EvalState, requested_stop
from snclr.methods.snclr import kernels as streaming
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.trainer import SAVE_SECONDS

# Queries per block: at 1,000 classes the float64 votes take 2 MB.
_VOTE_ROWS = 256


@dataclass(frozen=True)
class KnnScore:
    """Accuracies in [0, 1]; `top5` is None with five classes or fewer."""

    top1: float
    top5: float | None
    k: int
    temperature: float
    protocol: str
    predictions: Tensor
    """(n,) predicted class of each labeled test image, on the CPU."""


def evaluate_knn(
    session: Session, run: str | Path, *, data: str | None, test: str | None, k: int, temperature: float, workers: int,
    seed: int,
) -> KnnResult:  # fmt: skip
    """Evaluate a run by kNN and record the result."""
    _check_settings(k, temperature)
    target = open_target(session, run, data, test, seed=seed)
    train_labels, test_labels, _ = match_labels(target.train, target.test)
    common: dict[str, Any] = {"image_size": target.spec.image_size, "workers": workers}
    train = session.features(
        run, target.encoder, target.train, labels=train_labels, description="training features", **common
    )
    queries = session.features(
        run, target.encoder, target.test, labels=test_labels, description="test features", **common
    )
    with session.state(run, "knn", {**target.identity, "k": k, "temperature": temperature}) as state:
        score = knn(
            train.features, train.labels, queries.features, queries.labels, k=k, temperature=temperature,
            device=session.device, data=target.description, state=state, stop=session.stop, quiet=session.quiet,
        )  # fmt: skip
        skipped = len(train.skipped) + len(queries.skipped)
        numbers = {"top1": score.top1, "top5": score.top5}
        record = session.record(run, "knn", numbers, score.protocol, skipped=skipped)
    return KnnResult.from_record(record)


def _check_settings(k: int, temperature: float) -> None:
    if k < 1 or not temperature > 0:
        raise UserError(f"k is {k} and the temperature {temperature}; k must be at least 1, the temperature above 0")


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
    state: EvalState | None = None,
    stop: StopFlag | None = None,
    quiet: bool = True,
) -> KnnScore:
    """Classify test features (n, d) by their k nearest training features (m, d), weighted by exp(cosine / temperature).

    The search is exact, in blocks of at most 128 MB of similarities, on `device` (default: that of the features), and
    shared by all ranks. Rows with label -1 are left out, and k is at most the size of the training set. With
    `leave_one_out`, train and test are the same features, and no image is its own neighbor. `data` describes the two
    sets in the protocol. `stop` ends the call with StopRequested; with `state`, the same call continues.

    >>> train, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> knn(train, labels, torch.tensor([[2.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]), k=2).top1
    1.0
    """
    _check_settings(k, temperature)
    if leave_one_out and train.shape != test.shape:
        raise UserError("leave_one_out needs the same features as train and as test")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"training features {tuple(train.shape)} and test features {tuple(test.shape)} differ in width; "
            "take both from the same encoder"
        )
    keys, queries = labeled(train, train_labels, "training"), labeled(test, test_labels, "test")
    classes, known = check_classes(keys.labels, queries.labels)
    requested, k = k, min(k, len(keys.labels) - int(leave_one_out))
    device = torch.device(device or train.device)
    train_unit, test_unit = (F.normalize(part.features.float(), dim=1) for part in (keys, queries))
    train_unit, train_classes, truth = train_unit.to(device), keys.labels.cpu(), queries.labels.cpu()

    def vote(rows: range) -> Tensor:
        own = torch.arange(len(rows), device=device)
        cosine, index = streaming.topk(
            test_unit[rows.start : rows.stop].to(device), train_unit, k,
            exclude=(own, own + rows.start) if leave_one_out else None,
        )  # fmt: skip
        return _vote(cosine.cpu(), train_classes[index.cpu()], truth[rows.start : rows.stop], temperature)

    ranks, predictions = _vote_in_blocks(vote, len(truth), device, state, stop, quiet=quiet).unbind(dim=1)
    ranks[~known.cpu()] = len(classes)  # a class without training images is wrong even in a tie
    top1, top5 = top_shares(ranks, len(classes))
    lowered = "" if k == requested else f" ({requested} requested, lowered to the number of training images)"
    protocol = f"kNN: cosine, weighted vote, k = {k}{lowered}, temperature {temperature:g}; "
    if leave_one_out:
        protocol += "leave-one-out, "
    tested = None if leave_one_out else len(queries.labels)
    left_out = keys.left_out + (0 if leave_one_out else queries.left_out)
    protocol += describe_sets(len(keys.labels), tested, len(classes), left_out=left_out, data=data)
    if unknown := int((~known).sum()):
        protocol += f"; {unknown:,} test images of classes without a training image count as wrong"
    return KnnScore(top1, top5, k, temperature, protocol, predictions)


def _vote_in_blocks(
    vote: Callable[[range], Tensor], n: int, device: torch.device, state: EvalState | None, stop: StopFlag | None, *,
    quiet: bool,
) -> Tensor:  # fmt: skip
    """Return the votes (n, 2) of all rows (see `_vote`).

    Each round, every rank votes on one block of rows. Blocks and the order of every sum do not depend on the world
    size, so neither does the result.
    """
    rank, world_size = rank_and_size()
    done, saved_at = torch.empty(0, 2, dtype=torch.int64), time.monotonic()
    saved = None if state is None else state.load("votes", device, quiet=quiet)
    if saved is not None:
        done = saved.tensors["votes"].cpu()
    with Progress("kNN", total=n, quiet=quiet or rank > 0) as progress:
        progress.done = len(done)
        for block in range(-(-len(done) // _VOTE_ROWS), -(-n // _VOTE_ROWS), world_size):
            rows = range(min((block + rank) * _VOTE_ROWS, n), min((block + rank + 1) * _VOTE_ROWS, n))
            own = vote(rows) if len(rows) else done[:0]
            done = torch.cat([done, all_gather_rows(own.to(device)).cpu()])
            progress.update(len(done) - progress.done)
            signum = requested_stop(stop)
            due = len(done) < n and time.monotonic() - saved_at >= SAVE_SECONDS
            if state is not None and (due or signum is not None):
                state.save("votes", len(done), {"votes": done})
                saved_at = time.monotonic()
            if signum is not None:
                raise StopRequested(signum)
    return done


def _vote(cosine: Tensor, classes: Tensor, truth: Tensor, temperature: float) -> Tensor:
    """Return the rank of the true class and the prediction (n, 2) from the neighbors' cosines and classes (n, k)."""
    # Relative to the nearest, so that no temperature overflows; in float64 on the CPU, so that the order in which equal
    # weights are summed does not matter.
    weight = ((cosine - cosine[:, :1]).double() / temperature).exp()
    width = int(torch.maximum(classes.max(), truth.max())) + 1
    votes = torch.zeros(len(weight), width, dtype=torch.float64).scatter_add_(1, classes, weight)
    return torch.stack([true_ranks(votes, truth), votes.argmax(dim=1)], dim=1)  # argmax: the first of equals
