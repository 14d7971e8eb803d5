"""Nearest-neighbor classification with a few labeled images per class, averaged over draws of those images.

It suits datasets in which every class is a set of near-duplicates, such as views of one object: with all labels, every
encoder finds another view of the same object.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snclr.data.datasets.base import Labels
from snclr.data.sampler import Ids, epoch_order
from snclr.errors import count
from snclr.evaluation.baselines import measure_baselines, record_accuracy
from snclr.evaluation.features import Features
from snclr.evaluation.few_labels.subsets import sort_by_class
from snclr.evaluation.knn import knn
from snclr.evaluation.results import FewShotResult
from snclr.evaluation.scoring import Score, describe_sets, labeled
from snclr.evaluation.session import Session, open_inputs
from snclr.evaluation.state import EvalState
from snclr.runtime.stop import StopFlag

DRAWS = 20


@dataclass(frozen=True)
class FewShotScore(Score):
    """The mean over draws; `predictions` are those of the first draw."""

    by_draw: tuple[float, ...]
    """Top-1 accuracy of each draw."""

    @property
    def context(self) -> dict[str, Any]:
        """As for other scores, with the standard error over draws; that of one draw is the binomial one."""
        if len(self.by_draw) < 2:
            return super().context
        return {**super().context, "standard_error": statistics.stdev(self.by_draw) / math.sqrt(len(self.by_draw))}


def evaluate_few_shot(
    session: Session, *, data: str | None, test: str | None, labels_per_class: int, draws: int, seed: int,
    baselines: bool | None = None,
) -> FewShotResult:  # fmt: skip
    """Evaluate a run with a few labels per class, compare it with baselines and record the result."""
    inputs = open_inputs(session, data, test, seed=seed)
    train, queries = inputs.features(session)
    settings = {"labels_per_class": labels_per_class, "draws": draws, "seed": seed}

    def classify(train: Features, queries: Features, _: EvalState | None = None) -> FewShotScore:
        return few_shot(
            train.features, train.labels, queries.features, queries.labels, **settings, device=session.device,
            data=inputs.description, stop=session.stop,
        )  # fmt: skip

    score, kind = classify(train, queries), f"{labels_per_class}-shot"
    record = record_accuracy(
        session, inputs, kind, score, data=data, test=test, unreadable=queries.skipped, baselines=baselines,
        measure=lambda: measure_baselines(session, inputs, kind, settings, classify), draws=draws,
        labels_per_class=labels_per_class, by_draw=list(score.by_draw),
        skipped=len(train.skipped) + len(queries.skipped),
    )  # fmt: skip
    return FewShotResult.from_record(record)


def few_shot(
    train: Tensor, train_labels: Tensor | None, test: Tensor, test_labels: Tensor | None, *, labels_per_class: int = 1,
    draws: int = DRAWS, seed: int = 0, device: torch.device | str | None = None, data: str | None = None,
    stop: StopFlag | None = None,
) -> FewShotScore:  # fmt: skip
    """Classify test features (n, d) by the nearest (cosine) of `labels_per_class` training features of each class.

    The labeled images are drawn `draws` times from the training features (m, d), as a function of `seed`; all test
    images are classified in every draw. `top1` is the mean over draws.

    >>> train, labels = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
    >>> few_shot(train, labels, torch.tensor([[2.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]), draws=3).by_draw
    (1.0, 1.0, 1.0)
    """
    pool, queries = labeled(train, train_labels, "training"), labeled(test, test_labels, "test")
    classes = pool.labels.cpu().numpy()
    scores = []
    for draw in range(draws):
        chosen = torch.from_numpy(draw_labels(classes, labels_per_class, seed=seed, draw=draw)).to(pool.labels.device)
        few = pool.features[chosen], pool.labels[chosen]
        scores.append(knn(*few, queries.features, queries.labels, k=1, device=device, stop=stop))
    by_draw = tuple(score.top1 for score in scores)
    smallest = int(np.unique(classes, return_counts=True)[1].min())
    fewer = f" (the smallest class has {smallest})" if smallest < labels_per_class else ""
    protocol = f"few-shot: cosine, nearest neighbor, labels per class {labels_per_class}{fewer}, "
    unlabeled, first = pool.left_out + queries.left_out, scores[0]
    protocol += f"mean over {count(draws, 'draw')} (seed {seed}); " + describe_sets(
        len(pool.labels), len(queries.labels), len(np.unique(classes)), left_out=unlabeled, data=data
    )
    return FewShotScore(
        statistics.fmean(by_draw), None, protocol, first.predictions, first.truth, unlabeled, by_draw
    )  # fmt: skip


def draw_labels(labels: Labels, per_class: int, *, seed: int, draw: int) -> Ids:
    """Return the sorted indices of `per_class` random images of each class; all images of a smaller class.

    >>> labels = np.array([0, 0, 0, 1, 1, 2])
    >>> labels[draw_labels(labels, 2, seed=0, draw=0)].tolist()
    [0, 0, 1, 1, 2]
    """
    by_class, turn = sort_by_class(labels, epoch_order(len(labels), seed, epoch=draw))
    return np.sort(by_class[turn < per_class])
