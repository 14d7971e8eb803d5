"""Check before training which images cannot be read, and which photographs are of other formats."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ArrayDataset, open_dataset
from snclr.data.datasets.folder import MIN_FILES, other_photos, split_folder
from snclr.data.decode import BadImage
from snclr.data.sampler import epoch_order
from snclr.runtime.progress import Progress


@dataclass(frozen=True)
class ReadCheck:
    """Number of images that were decoded, and for those that cannot be read the reason by key."""

    checked: int
    unreadable: dict[str, str]


def check_images(
    data: str, *, min_side: int, limit: int = 1_000, seconds: float = 10.0, quiet: bool = True
) -> ReadCheck:
    """Decode the training images, or a random sample of at most `limit`, as training does; stop after `seconds`.

    Images in memory and remote images are not checked.
    """
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


def unread_photos(data: str) -> str:
    """Return a note about photographs of formats that are not read, if the data is a folder that is not large."""
    folder = Path(data).expanduser()
    if not folder.is_dir() or len(open_dataset(data, split="train")) >= MIN_FILES:
        return ""
    return other_photos(split_folder(folder, "train")).strip()
