"""Decoded images in memory that all data workers share, so that a small dataset is decoded once.

Layout: int64 totals (2,), int64 starts (n,), then for each image int64 (height, width) and its pixels. An image that is
not in the cache has start 0.
"""

import fcntl
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.decode import RGBImage

_ALIGNMENT = 16  # also the size of (height, width)
_SAMPLE = 32
"""Images after which the size of the dataset is estimated."""


class ImageCache:
    """Decoded images of a dataset of `length` images, up to `limit` bytes.

    If the first images show that the dataset is larger than the limit, no more are added. On Linux, the cache can be
    sent to another process, which shares it. The memory is freed when the last of them ends, even if it is killed.

    >>> cache = ImageCache(length=10, limit=10**6)
    >>> cache.add(3, np.zeros((2, 4, 3), np.uint8))
    >>> cache.get(3).shape, cache.get(4)
    ((2, 4, 3), None)
    """

    def __init__(self, length: int, limit: int, shared: str = "") -> None:
        self._length, self._limit, self._shared = length, limit, shared
        self._first = -(-8 * (2 + length) // _ALIGNMENT) * _ALIGNMENT  # position of the first image
        self._file = -1  # private memory
        if shared:  # by another process
            try:
                self._file = os.open(shared, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # the worker has a cache of its own, which stays empty
                self._limit = 0
        elif sys.platform == "linux":
            # Not a file in /dev/shm: that would outlive a kill, and containers limit it to 64 MB.
            self._file = os.memfd_create("snclr-images")
            os.ftruncate(self._file, self._first + limit)
        self._memory = mmap.mmap(self._file, self._first + self._limit)  # pages take memory only when they are written
        if self._file >= 0:
            weakref.finalize(self, os.close, self._file)
        self._totals: npt.NDArray[Any] = np.frombuffer(self._memory, np.int64, 2)  # bytes used, images added
        self._starts: npt.NDArray[Any] = np.frombuffer(self._memory, np.int64, length, offset=16)

    def __reduce__(self) -> "tuple[type[ImageCache], tuple[int, int, str]]":
        """Return how another process finds the memory."""
        return ImageCache, (self._length, self._limit, self._shared or f"/proc/{os.getpid()}/fd/{self._file}")

    def get(self, index: int) -> RGBImage | None:
        """Return an image, uint8 (H, W, 3), read-only; None if it is not in the cache."""
        start = int(self._starts[index])
        if start == 0:
            return None
        height, width = np.frombuffer(self._memory, np.int64, 2, offset=start).tolist()
        pixels = np.frombuffer(self._memory, np.uint8, 3 * height * width, offset=start + _ALIGNMENT)
        pixels.flags.writeable = False
        return pixels.reshape(height, width, 3)

    def add(self, index: int, image: RGBImage) -> None:
        """Add an image, unless the cache is full or the dataset is larger than the limit."""
        start = self._reserve(-(-(_ALIGNMENT + image.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        if start is None:
            return
        np.frombuffer(self._memory, np.int64, 2, offset=start)[:] = image.shape[:2]
        np.frombuffer(self._memory, np.uint8, image.nbytes, offset=start + _ALIGNMENT)[:] = image.reshape(-1)
        self._starts[index] = start  # last: readers take no lock

    def _reserve(self, size: int) -> int | None:
        """Return the position of `size` free bytes, or None. Only one process at a time reserves."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            used, count = self._totals.tolist()
            too_large = count == _SAMPLE and used * self._length > self._limit * count
            if too_large or used + size > self._limit:
                return None
            self._totals[:] = used + size, count + 1
            return self._first + int(used)
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)
