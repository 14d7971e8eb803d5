"""Check that the test images of a study are not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from snclr.data.info import DatasetInfo
from snclr.errors import UserError, count
from snclr.methods import METHODS
from snclr.studies.runs import Evaluation, Row

if TYPE_CHECKING:
    from snclr.data.datasets.base import ImageDataset, Labels

_HELD_OUT = "the data has no test split: the test images were seen in pre-training, without their labels"
_SEEN = "the test images are among those of --data: they were seen in pre-training, without their labels"


def check_test_images(
    evaluation: Evaluation, info: DatasetInfo, data: str, rows: Sequence[Row]
) -> tuple[Evaluation, list[str]]:
    """Check before training that there are labeled test images; return the evaluation with their digest, and notes.

    A note states if the test images are part of the training images. Methods that use labels are then rejected.
    """
    from snclr.data.splits import open_splits
    from snclr.evaluation.scoring import match_labels

    train, test, _ = open_splits(evaluation.data or data, evaluation.test)
    labels, test_labels = match_labels(train, test)
    note = _overlap_note(evaluation, info, data, train, test)
    supervised = [method for row in rows if METHODS[method := row.settings["method"]].needs_labels]
    if note and supervised:
        raise UserError(
            f"the method {supervised[0]} would learn from the labels of the test images: {note.partition(':')[0]}."
            f" Give a dataset with train/ and test/ folders, or leave {supervised[0]} out."
        )
    notes = [text for text in (_chance_note(info, test_labels), note, _k_note(evaluation.k, labels)) if text]
    return replace(evaluation, fingerprint=train.fingerprint() + test.fingerprint()), notes


def _chance_note(info: DatasetInfo, labels: Labels) -> str:
    """Return the chance levels, and how precise an accuracy on these test images can be."""
    from snclr.train.health import PURITY_IN_TRAINING

    sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
    n = int(sizes.sum())
    note = (
        f"chance: {sizes.max() / n:.1%} top-1 (largest class). The standard error of one run's accuracy is at most"
        f" {50 / n**0.5:.1f} points ({count(n, 'test image')})"
    )
    if info.same_class is None:
        return note
    return f"{note}; neighbor purity: {PURITY_IN_TRAINING}; chance {info.same_class:.1%}"


def _k_note(k: int | Literal["auto"], labels: Labels) -> str:
    """Return a note if more neighbors vote than the smallest class has images."""
    smallest = int(np.unique(labels[labels >= 0], return_counts=True)[1].min())
    if k == "auto" or k <= smallest:
        return ""
    of_class = count(smallest, "training image")
    return f"k = {k} exceeds the {of_class} of the smallest class; --k auto chooses k as `snclr knn` does"


def _overlap_note(
    evaluation: Evaluation, info: DatasetInfo, data: str, train: ImageDataset, test: ImageDataset
) -> str:  # fmt: skip
    """Return a note if test images are trained on. Images are compared: --eval-data may be a copy of --data."""
    from snclr.data.datasets.base import open_dataset
    from snclr.data.same_images import same_images

    if evaluation.data is None and evaluation.test is None:
        return _HELD_OUT if len(train) < info.images else ""
    trained_on = open_dataset(data, split="train", download=True)
    if evaluation.test is None:
        whole = open_dataset(evaluation.data or data, split="train", download=True)
        if len(train) < len(whole) and _is_copy(whole, trained_on):
            return _HELD_OUT
    return _SEEN if np.isin(*same_images(test, trained_on)).any() or _is_copy(test, trained_on) else ""


def _is_copy(a: ImageDataset, b: ImageDataset, sample: int = 8) -> bool:
    """Compare digests and, because a folder's digest covers names only, the pixels of some images."""
    from snclr.data.decode import BadImage

    if len(a) != len(b) or a.fingerprint() != b.fingerprint():
        return False
    for index in {len(a) * i // sample for i in range(sample)}:
        with contextlib.suppress(BadImage):
            if not np.array_equal(a.load(index), b.load(index)):
                return False
    return True
