"""Labels checked before anything is computed with them, and accuracies from scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.sources import Labels, Source, align_labels
from snclr.errors import UserError

_HOW_TO_LABEL = (
    "put the images of each class in a sub-folder of its own, at least two (in images of one class there is nothing to "
    "tell apart), or give a list file with a label after each path (separated by a tab)"
)


class Labelled(NamedTuple):
    """Features (n, d) with a known label (n,) each; `left_out` counts those without."""

    features: Tensor
    labels: Tensor
    left_out: int


def match_labels(train: Source, test: Source) -> tuple[Labels, Labels, list[str] | None]:
    """Labels of two sources numbered alike, by class name, and the names; UserError where they do not fit together."""
    for source, part in ((train, "training"), (test, "test")):
        if source.labels is None or not bool((source.labels >= 0).any()):
            raise UserError(f"the {part} images ({source.name}) have no labels, and this needs them: {_HOW_TO_LABEL}")
    assert train.labels is not None
    assert test.labels is not None
    if train.classes is None or test.classes is None or train.classes == test.classes:
        return train.labels, test.labels, train.classes
    aligned = align_labels(test, train.classes)
    lost = np.unique(test.labels[(test.labels >= 0) & (aligned < 0)])
    if len(lost):
        names = [test.classes[number] for number in lost]
        raise UserError(
            f"{len(names)} of the classes of the test images ({test.name}) are not among those of the training images "
            f"({train.name}): {_some(names)}; there are {_some(train.classes)}. Give two sets with the same class names"
        )
    return train.labels, aligned, train.classes


def labelled(features: Tensor, labels: Tensor | None, part: str) -> Labelled:
    """The rows with a label, on the features' device; UserError where there are none or the features are not finite."""
    if labels is None or not bool((labels >= 0).any()):
        raise UserError(f"the {part} images have no labels, and this needs them: {_HOW_TO_LABEL}")
    if features.ndim != 2 or labels.shape != (len(features),):
        raise UserError(
            f"the {part} set has features {tuple(features.shape)} and labels {tuple(labels.shape)}; "
            "needed are (n, d) and (n,)"
        )
    if not bool(features.isfinite().all()):
        raise UserError(
            f"the features of the {part} images are not all finite numbers: the encoder's weights are damaged or its "
            "training diverged; take an earlier checkpoint"
        )
    known = labels >= 0
    labels = labels.to(device=features.device, dtype=torch.int64)
    if bool(known.all()):
        return Labelled(features, labels, 0)
    known = known.to(features.device)
    return Labelled(features[known], labels[known], int((~known).sum()))


def check_classes(train_labels: Tensor, test_labels: Tensor) -> tuple[Tensor, Tensor]:
    """The training set's classes (C,), sorted, and which test rows (n,) belong to one of them; UserError below two."""
    classes: Tensor = torch.unique(train_labels)
    if len(classes) < 2:
        raise UserError(
            "the training images are all of one class, so there is nothing to tell apart; give at least two"
        )
    known = torch.isin(test_labels, classes)
    if not bool(known.any()):
        raise UserError(
            f"none of the test images' classes ({_some(torch.unique(test_labels).tolist())}) occurs among the training "
            f"images ({_some(classes.tolist())}); give two sets with the same classes, numbered alike"
        )
    return classes, known


def true_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Place (n,) of the true class in each row of scores (n, C), 0 for the best; of equal scores the lower class wins.

    >>> true_ranks(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]), torch.tensor([2, 1]))
    tensor([1, 1])
    """
    own = scores.gather(1, labels[:, None])
    not_before = torch.arange(scores.shape[1], device=scores.device) >= labels[:, None]
    # Those it beats or equals are counted, itself among them, not those that beat it: a score that is NaN comes last.
    beaten = (scores < own) | ((scores == own) & not_before)
    return scores.shape[1] - beaten.sum(dim=1)


def top_shares(ranks: Tensor, num_classes: int) -> tuple[float, float | None]:
    """Top-1 and top-5 in [0, 1]; top-5 is None with five classes or fewer, where it says nothing."""
    top5 = None if num_classes <= 5 else (ranks < 5).double().mean().item()
    return (ranks < 1).double().mean().item(), top5


def describe_sets(train: int, test: int | None, classes: int, *, left_out: int, data: str | None) -> str:
    """The last part of every protocol: what was trained and tested on, in numbers of images.

    >>> describe_sets(6000, 1500, 5, left_out=0, data="demo")
    '6,000 training and 1,500 test images, 5 classes (demo)'
    """
    text = f"{train:,} images" if test is None else f"{train:,} training and {test:,} test images"
    text += f", {classes} classes"
    if left_out:
        text += f", {left_out:,} images without a label left out"
    return text if data is None else f"{text} ({data})"


def _some(names: list[str] | list[int]) -> str:
    return ", ".join(map(str, names[:4])) + (" …" if len(names) > 4 else "")
