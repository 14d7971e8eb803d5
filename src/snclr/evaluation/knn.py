"""Nearest-neighbor classification of frozen features: weighted kNN (Wu et al., 2018), and with a few labels per class.

A few labels per class suit datasets in which every class is a set of near-duplicates, such as views of one object: with
all labels, every encoder finds another view of the same object.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.datasets.base import Labels
from snclr.data.sampler import Ids, epoch_order
from snclr.distributed.collectives import all_gather_rows, rank_and_size
from snclr.errors import count
from snclr.evaluation.baselines import FeatureClassifier, record_accuracy
from snclr.evaluation.results import FewShotResult, KnnResult
from snclr.evaluation.scoring import Score, describe_sets, labeled, match_classes, top_accuracies, true_ranks
from snclr.evaluation.session import Session, open_inputs
from snclr.evaluation.state import EvalState, requested_stop
from snclr.evaluation.subsets import sort_by_class
from snclr.methods.common import kernels
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.trainer import SAVE_SECONDS

# Queries per block: at 1,000 classes the float64 votes take 2 MB.
_VOTE_ROWS = 256


def evaluate_knn(
    session: Session, *, data: str | None, test: str | None, k: int | Literal["auto"],
    temperature: float, seed: int, baselines: bool | None = None,
) -> KnnResult:  # fmt: skip
    """Evaluate a run by kNN, compare it with baselines and record the result."""
    inputs = open_inputs(session, data, test, seed=seed)
    train, queries = inputs.features(session)
    settings = {"k": k, "temperature": temperature}
    classifier = FeatureClassifier("knn", knn, session, inputs, settings)
    with session.state("knn", {**inputs.identity, **settings}) as state:
        return record_accuracy(
            KnnResult, "knn", classifier(train, queries, state), classifier, baselines=baselines,
            warnings=_check_k(k, train.labels, inputs.train.classes),
            settings={"data": data, "test": test, "seed": seed, **settings},
        )  # fmt: skip


def evaluate_few_shot(
    session: Session, *, data: str | None, test: str | None, labels_per_class: int, draws: int, seed: int,
    baselines: bool | None = None,
) -> FewShotResult:  # fmt: skip
    """Evaluate a run with a few labels per class, compare it with baselines and record the result."""
    inputs = open_inputs(session, data, test, seed=seed)
    settings = {"labels_per_class": labels_per_class, "draws": draws, "seed": seed}

    def unsaved(*sets: Tensor, state: EvalState | None, quiet: bool, **options: Any) -> Score:
        return few_shot(*sets, **options)  # seconds per draw: no state to save, no progress

    kind = f"{labels_per_class}-shot"
    classifier = FeatureClassifier(kind, unsaved, session, inputs, settings)
    train, queries = inputs.features(session)
    assert train.labels is not None
    smallest = int(torch.unique(train.labels[train.labels >= 0], return_counts=True)[1].min())
    fewer = (
        f"{labels_per_class} labels per class are more than the {count(smallest, 'image')} of the smallest class: "
        "all of them are used"
    )
    return record_accuracy(
        FewShotResult, kind, classifier(train, queries), classifier, baselines=baselines,
        labels_per_class=labels_per_class, draws=draws, warnings=[fewer] if labels_per_class > smallest else [],
    )  # fmt: skip


def auto_k(class_sizes: Tensor) -> int:
    """Return the number of neighbors for classes of these sizes: that of the smallest class, in 10 … 200.

    It is at most the number of training images.

    >>> [auto_k(torch.tensor(sizes)) for sizes in ([500, 700], [40, 90], [3, 90], [3, 4])]
    [200, 40, 10, 7]
    """
    return min(max(int(class_sizes.min()), 10), 200, int(class_sizes.sum()))


def _check_k(k: int | Literal["auto"], labels: Tensor | None, names: list[str] | None) -> list[str]:
    """Return a warning if a given number of neighbors is too large for the training images."""
    assert labels is not None
    classes, sizes = torch.unique(labels[labels >= 0], return_counts=True)
    images, smallest = int(sizes.sum()), int(sizes.argmin())
    if k == "auto" or k <= int(sizes[smallest]):
        return []
    if k > images:
        return [f"k = {k} is more than the {count(images, 'training image')}: k = {images} was used"]
    name = names[int(classes[smallest])] if names else classes[smallest].item()
    of_class = count(int(sizes[smallest]), "training image")
    return [f"k = {k} exceeds the {of_class} of class {name}; give a smaller --k, or --k auto"]


@torch.no_grad()
def knn(
    train: Tensor, train_labels: Tensor | None, test: Tensor, test_labels: Tensor | None, *,
    k: int | Literal["auto"] = 200, temperature: float = 0.07, device: torch.device | str | None = None,
    data: str | None = None, state: EvalState | None = None, stop: StopFlag | None = None, quiet: bool = True,
) -> Score:  # fmt: skip
    """Classify test features (n, d) by their k nearest training features (m, d), weighted by exp(cosine / temperature).

    The search is exact, in blocks of at most 128 MB of similarities, on `device` (default: that of the features), and
    shared by all ranks. Rows with label -1 are left out, and k is at most the size of the training set ("auto": see
    `auto_k`). `data` describes the two sets in the protocol. `stop` ends the call with StopRequested; with `state`, the
    same call continues.

    >>> train, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> knn(train, labels, torch.tensor([[2.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]), k=2).top1
    1.0
    """
    keys, queries = labeled(train, train_labels, "training"), labeled(test, test_labels, "test")
    classes, known = match_classes(keys.labels, queries.labels)
    class_sizes = torch.unique(keys.labels, return_counts=True)[1]
    used_k = auto_k(class_sizes) if k == "auto" else min(k, len(keys.labels))
    device = torch.device(device or train.device)
    train_unit, test_unit = (F.normalize(part.features.float(), dim=1) for part in (keys, queries))
    train_unit, train_classes, truth = train_unit.to(device), keys.labels.cpu(), queries.labels.cpu()

    def vote(rows: slice) -> Tensor:
        cosine, index = kernels.topk(test_unit[rows].to(device), train_unit, used_k)
        return _vote(cosine.cpu(), train_classes[index.cpu()], truth[rows], temperature)

    class_ranks, predictions = _vote_in_blocks(vote, len(truth), device, state, stop, quiet=quiet).unbind(dim=1)
    class_ranks[~known.cpu()] = len(classes)  # a class without training images is wrong even in a tie
    origin = "" if k == used_k else f" ({k} requested, lowered to the number of training images)"
    origin = " (auto)" if k == "auto" else origin
    protocol = f"kNN: cosine, weighted vote, k = {used_k}{origin}, temperature {temperature:g}; "
    unlabeled = keys.left_out + queries.left_out
    protocol += describe_sets(len(keys.labels), len(queries.labels), len(classes), left_out=unlabeled, data=data)
    if unknown := int((~known).sum()):
        protocol += f"; {count(unknown, 'test image')} of a class without training images counted as wrong"
    return Score(*top_accuracies(class_ranks, len(classes)), protocol, predictions, truth, unlabeled, {"k": used_k})


def _vote_in_blocks(
    vote: Callable[[slice], Tensor], n: int, device: torch.device, state: EvalState | None, stop: StopFlag | None, *,
    quiet: bool,
) -> Tensor:  # fmt: skip
    """Return the rank of the true class and the predicted class (n, 2) of all rows.

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
            start = (block + rank) * _VOTE_ROWS
            local_votes = vote(slice(start, start + _VOTE_ROWS)) if start < n else done[:0]
            done = torch.cat([done, all_gather_rows(local_votes.to(device)).cpu()])
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


def few_shot(
    train: Tensor, train_labels: Tensor | None, test: Tensor, test_labels: Tensor | None, *, labels_per_class: int = 1,
    draws: int = 20, seed: int = 0, device: torch.device | str | None = None, data: str | None = None,
    stop: StopFlag | None = None,
) -> Score:  # fmt: skip
    """Classify test features (n, d) by the nearest (cosine) of `labels_per_class` training features of each class.

    The labeled images are drawn `draws` times from the training features (m, d), as a function of `seed`; all test
    images are classified in every draw. `top1` is the mean over draws, `predictions` are those of the first; `context`
    has the accuracy of each draw and the standard error over draws (of one draw, the binomial one).

    >>> train, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> few_shot(train, labels, torch.tensor([[2.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]), draws=3).facts["by_draw"]
    [1.0, 1.0, 1.0]
    """
    pool, queries = labeled(train, train_labels, "training"), labeled(test, test_labels, "test")
    classes = pool.labels.cpu().numpy()
    scores = []
    for draw in range(draws):
        chosen = torch.from_numpy(draw_labels(classes, labels_per_class, seed=seed, draw=draw)).to(pool.labels.device)
        few = pool.features[chosen], pool.labels[chosen]
        scores.append(knn(*few, queries.features, queries.labels, k=1, device=device, stop=stop))
    by_draw = [score.top1 for score in scores]
    smallest = int(np.unique(classes, return_counts=True)[1].min())
    fewer = f" (the smallest class has {smallest})" if smallest < labels_per_class else ""
    unlabeled, first = pool.left_out + queries.left_out, scores[0]
    protocol = (
        f"few-shot: cosine, nearest neighbor, labels per class {labels_per_class}{fewer}, mean over "
        f"{count(draws, 'draw')} (seed {seed}); "
        + describe_sets(len(classes), len(queries.labels), len(np.unique(classes)), left_out=unlabeled, data=data)
    )
    facts: dict[str, Any] = {"by_draw": by_draw}
    if draws > 1:
        facts["standard_error"] = statistics.stdev(by_draw) / math.sqrt(draws)
    return Score(statistics.fmean(by_draw), None, protocol, first.predictions, first.truth, unlabeled, facts)


def draw_labels(labels: Labels, per_class: int, *, seed: int, draw: int) -> Ids:
    """Return the sorted indices of `per_class` random images of each class; all images of a smaller class.

    >>> labels = np.array([0, 0, 0, 1, 1, 2])
    >>> labels[draw_labels(labels, 2, seed=0, draw=0)].tolist()
    [0, 0, 1, 1, 2]
    """
    by_class, turn = sort_by_class(labels, epoch_order(len(labels), seed, epoch=draw))
    return np.sort(by_class[turn < per_class])
