"""Warn about test images that are a held-out part of the data, or that the run was trained on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset, open_dataset
from snclr.data.decode import load_or_none
from snclr.data.loader import Skip
from snclr.data.same_images import is_same_dataset, source_of
from snclr.data.splits import holds_out_test, take
from snclr.errors import UserError, count
from snclr.evaluation.session import EvalInputs, Session, data_of
from snclr.io.hashing import sha256_file

_MAX_FILES = 200_000  # each costs a stat; on a network disk, more would take minutes
_MAX_DECODED = 2_000


def split_warnings(
    session: Session, inputs: EvalInputs, data: str | None, test: str | None, skipped: Sequence[Skip]
) -> list[str]:
    """Return a warning if the test images are a held-out fifth, or if the run was trained on some of them.

    `skipped` are the unreadable images, which do not count.
    """

    def find() -> list[str]:
        bad = {skip.key for skip in skipped}
        labeled = np.flatnonzero(inputs.test_labels >= 0)
        images = take(inputs.test, labeled[[inputs.test.key(int(index)) not in bad for index in labeled]])
        seen = _count_of_run(session.run, images)
        held_out = holds_out_test(data or data_of(session.run), test)
        if held_out:
            trained = ", and the run was trained on "
            trained = f"{trained}{'all' if seen == len(images) else f'{seen:,}'} of them" if seen else ""
            return [f"the test images are a held-out fifth of the data{trained}; --test gives separate ones"]
        return [f"the run was trained on {seen:,} of the {count(len(images), 'test image')}"] if seen else []

    return session.on_rank_zero(find)


def _count_of_run(run: Path, test: ImageDataset) -> int | None:
    """Return how many test images a run was trained on; None if its images are not available."""
    try:
        return count_trained_on(test, open_dataset(data_of(run), split="train"))
    except UserError:
        return None


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
    if not (isinstance(tests, ArrayDataset) and isinstance(trains, ArrayDataset)):
        is_small = len(ids) + len(train_ids) <= _MAX_DECODED
        if tests.remote or trains.remote or not is_small:
            return None
    known = {_pixels(trains, index) for index in train_ids.tolist()} - {None}
    return sum(_pixels(tests, index) in known for index in ids.tolist())


def _count_files(tests: Iterable[Path], trains: Iterable[Path]) -> int:
    """Count the test files whose content is that of a training file; only files of equal size are read."""
    by_size: dict[int, list[Path]] = defaultdict(list)
    inodes: set[tuple[int, int]] = set()
    for path, status in _stat_files(trains):
        by_size[status.st_size].append(path)
        inodes.add((status.st_dev, status.st_ino))

    @functools.cache
    def digests(size: int) -> set[str | None]:
        return {_digest(other) for other in by_size[size]} - {None}

    found = 0
    for path, status in _stat_files(tests):
        if (status.st_dev, status.st_ino) in inodes:
            found += 1
        elif status.st_size in by_size:
            found += _digest(path) in digests(status.st_size)
    return found


def _stat_files(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files that exist, with their status."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path, os.stat(path)


def _digest(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None


def _pixels(dataset: ImageDataset, index: int) -> bytes | None:
    """Return a digest of the shape and the pixels of an image; None if it cannot be read."""
    image = load_or_none(dataset.load, index)
    if image is None:
        return None
    return hashlib.sha256(repr(image.shape).encode() + np.ascontiguousarray(image).tobytes()).digest()
