"""Facts about the images of a study, and checks that its test images are not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from snclr.benchmark.plan import Entry, Evaluation, data_name
from snclr.errors import UserError
from snclr.methods import METHODS

if TYPE_CHECKING:
    from snclr.data.datasets.base import ImageDataset

_HELD_OUT = "the data has no test split: the test images were seen in pre-training, without their labels"
_SEEN = "the test images are among those of --data: they were seen in pre-training, without their labels"


@dataclass(frozen=True)
class DatasetInfo:
    """Size, digest and classes of the training images."""

    name: str
    images: int
    fingerprint: str
    classes: int | None
    same_class: float | None
    """Probability that two random labeled images have the same class."""


def inspect_dataset(data: str) -> DatasetInfo:
    """Open the training images and count them and their classes."""
    from snclr.data.datasets.base import open_dataset

    if not data:
        raise UserError("data is missing: give --data (the images to train on)")
    dataset = open_dataset(data, split="train", download=True)
    labels = np.empty(0, int) if dataset.labels is None else dataset.labels[dataset.labels >= 0]
    shares = np.unique(labels, return_counts=True)[1] / max(len(labels), 1)
    same_class = float((shares**2).sum()) if len(shares) else None
    return DatasetInfo(data_name(data), len(dataset), dataset.fingerprint(), len(shares) or None, same_class)


def check_test_images(
    evaluation: Evaluation, info: DatasetInfo, data: str, entries: Sequence[Entry]
) -> tuple[Evaluation, str]:
    """Check before training that there are labeled test images; return the evaluation with their digest, and a note.

    The note states if the test images are part of the training images. Methods that use labels are then rejected.
    """
    from snclr.data.splits import open_splits
    from snclr.evaluation.scoring import match_labels

    train, test, _ = open_splits(evaluation.data or data, evaluation.test)
    match_labels(train, test)
    note = _overlap_note(evaluation, info, data, train, test)
    supervised = [m for m in (e.settings["method"] for e in entries) if m in METHODS and METHODS[m].needs_labels]
    if note and supervised:
        raise UserError(
            f"the method {supervised[0]} would learn from the labels of the test images: {note.partition(':')[0]}."
            f" Give a dataset with train/ and test/ folders, or leave {supervised[0]} out."
        )
    return replace(evaluation, fingerprint=train.fingerprint() + test.fingerprint()), note


def _overlap_note(
    evaluation: Evaluation, info: DatasetInfo, data: str, train: ImageDataset, test: ImageDataset
) -> str:  # fmt: skip
    """Return a note if test images are trained on. Images are compared: --eval-data may be a copy of --data."""
    from snclr.data.datasets.base import open_dataset
    from snclr.evaluation.retrieval.gallery import same_images

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
