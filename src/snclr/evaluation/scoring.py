"""Validated labels, and accuracies from class scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.datasets.base import ImageDataset, Labels
from snclr.data.datasets.folder import HOW_TO_LABEL, require_labels
from snclr.data.labels import renumber_labels
from snclr.data.loader import Skip
from snclr.errors import UserError, count, first_names


@dataclass(frozen=True)
class Score:
    """Accuracies in [0, 1]; `top5` is None with five classes or fewer."""

    top1: float
    top5: float | None
    protocol: str
    predictions: Tensor
    """(n,) the predicted class of each labeled test image, on the CPU."""
    truth: Tensor
    """(n,) its class."""
    unlabeled: int
    """Training and test images without a label, which were left out."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further values to record, as part of `context`."""
    skipped: Sequence[Skip] = ()
    """Test images that could not be read; a `FeatureClassifier` adds them and the next number to its scores."""
    skipped_training: int = 0
    """Number of training images that could not be read."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The accuracies by name, as recorded in results.jsonl."""
        return {"top1": self.top1, "top5": self.top5}

    @property
    def context(self) -> dict[str, Any]:
        """What is needed to judge `top1`, as recorded in results.jsonl: the standard error is binomial.

        >>> truth = torch.tensor([0, 0, 0, 1])
        >>> Score(0.5, None, "", truth, truth, unlabeled=2).context
        {'n': 4, 'standard_error': 0.25, 'classes': 2, 'chance': 0.75, 'unlabeled': 2}
        """
        _, sizes = torch.unique(self.truth, return_counts=True)
        n = len(self.truth)
        return {
            "n": n,
            "standard_error": math.sqrt(self.top1 * (1 - self.top1) / n),
            "classes": len(sizes),
            "chance": int(sizes.max()) / n,
            "unlabeled": self.unlabeled,
            **self.facts,
        }


class Labeled(NamedTuple):
    """Labeled features (n, d), labels (n,), and the number of unlabeled rows that were left out."""

    features: Tensor
    labels: Tensor
    left_out: int


def match_labels(train: ImageDataset, test: ImageDataset) -> tuple[Labels, Labels]:
    """Return the labels of both datasets in one numbering by class name: two folders may number theirs differently."""
    for dataset, part in ((train, "training"), (test, "test")):
        require_labels(dataset, part)
    assert train.labels is not None
    assert test.labels is not None
    if train.classes is None or test.classes is None or train.classes == test.classes:
        return train.labels, test.labels
    aligned = renumber_labels(test.labels, test.classes, train.classes)
    lost = np.unique(test.labels[(test.labels >= 0) & (aligned < 0)])
    if len(lost):
        names = [test.classes[number] for number in lost]
        raise UserError(
            f"classes of the test images ({test.name}) that the training images ({train.name}) lack: "
            f"{first_names(names)}. These have {first_names(train.classes)}. Give two sets with the same class names."
        )
    return train.labels, aligned


def labeled(features: Tensor, labels: Tensor | None, part: str) -> Labeled:
    """Return the labeled rows on the features' device; UserError if there are none or features are not finite."""
    if labels is None or not bool((labels >= 0).any()):
        raise UserError(f"the {part} images have no labels. To label them, {HOW_TO_LABEL}")
    if not bool(features.isfinite().all()):
        raise UserError(
            f"the features of the {part} images are not all finite: the encoder's weights are damaged or its training "
            "diverged. Use an earlier checkpoint"
        )
    known = labels >= 0
    labels = labels.to(device=features.device, dtype=torch.int64)
    if bool(known.all()):
        return Labeled(features, labels, 0)
    known = known.to(features.device)
    return Labeled(features[known], labels[known], int((~known).sum()))


def match_classes(train_labels: Tensor, test_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted training classes (C,) and which test rows (n,) belong to one of them."""
    classes: Tensor = torch.unique(train_labels)
    if len(classes) < 2:
        raise UserError("the training images are all of one class; give at least two classes")
    known = torch.isin(test_labels, classes)
    if not bool(known.any()):
        ours, theirs = (first_names(map(str, numbers.tolist())) for numbers in (torch.unique(test_labels), classes))
        raise UserError(
            f"no class of the test images ({ours}) occurs among the training images ({theirs}); give two sets with the "
            "same classes, numbered alike"
        )
    return classes, known


def shared_classes(train_labels: Tensor, test_labels: Tensor) -> Tensor:
    """Return the sorted classes (C,); refuse a test set with classes that the training set lacks."""
    classes, known = match_classes(train_labels, test_labels)
    if not bool(known.all()):
        missing = torch.unique(test_labels[~known])
        raise UserError(
            f"{len(missing)} of the test images' classes have no labeled training image, such as class "
            f"{missing[0].item()}; add training images of these classes or remove them from the test set"
        )
    return classes


def true_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the rank (n,) of the true class in scores (n, C), 0 for the best; ties go to the lower class.

    >>> true_ranks(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]), torch.tensor([2, 1]))
    tensor([1, 1])
    """
    true_scores = scores.gather(1, labels[:, None])
    not_before = torch.arange(scores.shape[1], device=scores.device) >= labels[:, None]
    # Count the classes it beats, not those that beat it: a NaN score comes last.
    beaten = (scores < true_scores) | ((scores == true_scores) & not_before)
    return scores.shape[1] - beaten.sum(dim=1)


def top_accuracies(ranks: Tensor, num_classes: int) -> tuple[float, float | None]:
    """Return top-1 and top-5 accuracy in [0, 1]; top-5 is None with five classes or fewer."""
    top5 = None if num_classes <= 5 else (ranks < 5).double().mean().item()
    return (ranks < 1).double().mean().item(), top5


def describe_sets(train: int, test: int, classes: int, *, left_out: int, data: str | None) -> str:
    """Describe the training and test set, the last part of every protocol.

    >>> describe_sets(6000, 1500, 5, left_out=1, data="demo")
    '6,000 training and 1,500 test images, 5 classes, 1 image without a label left out (demo)'
    """
    text = f"{train:,} training and {count(test, 'test image')}, {classes} classes"
    if left_out:
        text += f", {count(left_out, 'image')} without a label left out"
    return text if data is None else f"{text} ({data})"
