"""Name, size and classes of a dataset."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from snclr.errors import UserError

VALIDATION_SHARE = 0.1
"""Share of each training class in the validation part of a dataset."""
FIT, VALIDATION = "#fit", "#validation"
"""Endings of `--data` that name a part of the training split."""
_SPLIT_NAMES = ("train", "training", "val", "validation", "test")


@dataclass(frozen=True)
class DatasetInfo:
    """Name, size, digest and classes of the training images."""

    name: str
    images: int
    fingerprint: str
    classes: int | None
    same_class: float | None
    """Probability that two random labeled images have the same class."""


def inspect_dataset(data: str) -> DatasetInfo:
    """Open the training images and count them and their classes."""
    import numpy as np

    from snclr.data.datasets.base import open_dataset

    if not data:
        raise UserError("data is missing: give --data (the images to train on)")
    dataset = open_dataset(data, split="train", download=True)
    labels = np.empty(0, int) if dataset.labels is None else dataset.labels[dataset.labels >= 0]
    shares = np.unique(labels, return_counts=True)[1] / max(len(labels), 1)
    same_class = float((shares**2).sum()) if len(shares) else None
    return DatasetInfo(dataset_name(data), len(dataset), dataset.fingerprint(), len(shares) or None, same_class)


@dataclass(frozen=True)
class ReadCheck:
    """How many images were decoded, and the reasons of those that cannot be read, by key."""

    checked: int
    unreadable: dict[str, str]


def check_images(
    data: str, *, min_side: int, limit: int = 1_000, seconds: float = 10.0, quiet: bool = True
) -> ReadCheck:
    """Decode the training images, or a spread sample of at most `limit`, as training does; stop after `seconds`.

    Images in memory and remote images are not checked.
    """
    import numpy as np

    from snclr.data.datasets.base import ArrayDataset, open_dataset
    from snclr.data.decode import BadImage
    from snclr.data.sampler import epoch_order
    from snclr.runtime.progress import Progress

    dataset = open_dataset(data, split="train")
    if isinstance(dataset, ArrayDataset) or dataset.remote:
        return ReadCheck(0, {})
    ids = np.arange(len(dataset)) if len(dataset) <= limit else epoch_order(len(dataset), 0, epoch=0)[:limit]
    unreadable: dict[str, str] = {}
    start, checked = time.monotonic(), 0
    with Progress("checking images", len(ids), quiet=quiet) as progress:
        for index in ids.tolist():
            try:
                dataset.load(index, min_side)
            except BadImage as error:
                unreadable[dataset.key(index)] = error.reason
            checked += 1
            progress.update(1)
            if time.monotonic() - start > seconds:
                break
    return ReadCheck(checked, unreadable)


def split_part(data: str) -> tuple[str, str]:
    """Split the name of a part into dataset and part; the part is empty for a whole dataset or an existing path.

    >>> split_part("demo#fit"), split_part("demo")
    (('demo', '#fit'), ('demo', ''))
    """
    for part in (FIT, VALIDATION):
        if data.endswith(part) and not Path(data).expanduser().exists():
            return data.removesuffix(part), part
    return data, ""


def dataset_name(data: str) -> str:
    """Return the name of a dataset for tables: the last part of its path, with the parent of a split.

    >>> dataset_name("/home/me/flowers/"), dataset_name("/home/me/flowers/train"), dataset_name("demo")
    ('flowers', 'flowers/train', 'demo')
    """
    path = Path(data)
    return f"{path.parent.name}/{path.name}".lstrip("/") if path.name in _SPLIT_NAMES else path.name
