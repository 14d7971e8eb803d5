"""Check before training which images cannot be read, and which photographs are of other formats."""

import time
from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ArrayDataset, open_dataset
from snclr.data.datasets.folder import MIN_FILES, other_photos, split_folder
from snclr.data.decode import BadImage
from snclr.data.sampler import epoch_order
from snclr.runtime.progress import Progress

MAX_SECONDS = 10.0


def check_images(data: str, *, min_side: int, limit: int = 1_000, quiet: bool = True) -> tuple[int, dict[str, str]]:
    """Decode the training images, or a random sample of at most `limit`, as training does, for at most `MAX_SECONDS`.

    Return how many were decoded, and for those that cannot be read the reason by key. Images in memory and remote
    images are not checked.
    """
    dataset = open_dataset(data, split="train")
    if isinstance(dataset, ArrayDataset) or dataset.remote:
        return 0, {}
    ids = np.arange(len(dataset)) if len(dataset) <= limit else epoch_order(len(dataset), 0, epoch=0)[:limit]
    unreadable: dict[str, str] = {}
    start = time.monotonic()
    with Progress("checking images", len(ids), quiet=quiet) as progress:
        for index in ids.tolist():
            try:
                dataset.load(index, min_side)
            except BadImage as error:
                unreadable[dataset.key(index)] = str(error)
            progress.update(1)
            if time.monotonic() - start > MAX_SECONDS:
                break
    return progress.done, unreadable


def unread_photos(data: str) -> str:
    """Return a note about photographs of formats that are not read, if the data is a folder that is not large."""
    folder = Path(data).expanduser()
    if not folder.is_dir() or len(open_dataset(data, split="train")) >= MIN_FILES:
        return ""
    return other_photos(split_folder(folder, "train")).strip()
