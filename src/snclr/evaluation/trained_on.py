"""Warnings about test images that the run was trained on: the same files or exact copies.

`snclr curate --find leaks` searches for similar images instead, see `analysis/curation.py: leaks`.
"""

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset, open_dataset
from snclr.data.decode import load_or_none
from snclr.data.loader import Skip
from snclr.data.splits import is_same_dataset, source_of, take
from snclr.errors import UserError, count
from snclr.evaluation.session import EvalInputs, Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.io.hashing import sha256_bytes, sha256_file

_MAX_FILES = 200_000  # each costs a stat; on a network disk, more would take minutes
_MAX_DECODED = 2_000


def split_warnings(session: Session, inputs: EvalInputs, skipped: Sequence[Skip]) -> list[str]:
    """Return a warning if the test images are a held-out fifth, or if the run was trained on some of them.

    `skipped` are the unreadable test images, which do not count.
    """

    def find() -> list[str]:
        unreadable = [skip.index for skip in skipped]
        images = take(inputs.test, np.setdiff1d(np.flatnonzero(inputs.test_labels >= 0), unreadable))
        try:
            seen = count_trained_on(images, open_dataset(data_of(session.run), split="train"))
        except UserError:  # the images that the run was trained on are not available
            seen = None
        if inputs.held_out:
            part = "all" if seen == len(images) else f"{seen or 0:,}"
            trained = f", and the run was trained on {part} of them" if seen else ""
            return [f"the test images are a held-out fifth of the data{trained}; --test gives separate ones"]
        return [f"the run was trained on {seen:,} of the {count(len(images), 'test image')}"] if seen else []

    return on_rank_zero(find)


def count_trained_on(test: ImageDataset, trained: ImageDataset) -> int | None:
    """Return how many test images are among the images trained on, exact copies included; None if unknown.

    Files are compared by content, arrays by pixels, other datasets by decoded pixels if they are small and local.
    """
    (tests, ids), (trains, train_ids) = source_of(test), source_of(trained)
    if is_same_dataset(tests, trains):
        return int(np.isin(ids, train_ids).sum())
    if isinstance(tests, FileDataset) and isinstance(trains, FileDataset):
        if len(ids) + len(train_ids) > _MAX_FILES:
            return None
        return _count_files(map(tests.file, ids.tolist()), map(trains.file, train_ids.tolist()))
    in_memory = isinstance(tests, ArrayDataset) and isinstance(trains, ArrayDataset)
    if not in_memory and (tests.remote or trains.remote or len(ids) + len(train_ids) > _MAX_DECODED):
        return None
    known = {_pixels(trains, index) for index in train_ids.tolist()} - {None}
    return sum(_pixels(tests, index) in known for index in ids.tolist())


def _count_files(tests: Iterable[Path], trains: Iterable[Path]) -> int:
    """Count the test files whose content is that of a training file; only files of equal size are read."""
    by_size: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)  # and inode
    for path, size, inode in _stat_files(trains):
        by_size[size][inode] = path

    @functools.cache
    def digests(size: int) -> set[str | None]:
        return {_digest(other) for other in by_size[size].values()} - {None}

    files = ((path, size, inode) for path, size, inode in _stat_files(tests) if size in by_size)
    return sum(inode in by_size[size] or _digest(path) in digests(size) for path, size, inode in files)


def _stat_files(paths: Iterable[Path]) -> Iterator[tuple[Path, int, tuple[int, int]]]:
    """Yield the files that exist, with their size and inode."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            yield path, status.st_size, (status.st_dev, status.st_ino)


def _digest(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return sha256_file(path)
    return None


def _pixels(dataset: ImageDataset, index: int) -> str | None:
    """Return a digest of the shape and the pixels of an image; None if it cannot be read."""
    image = load_or_none(dataset.load, index)
    if image is None:
        return None
    return sha256_bytes(repr(image.shape).encode() + image.tobytes())
