"""A dataset of tar shards, local or remote, with random access by index.

Local shards are shuffled as one dataset. Remote shards are read one after another, through a sliding window.
"""

import io
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.cache import RemoteShard, ShardCache
from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import BadImage, RGBImage, decode_stream
from snclr.data.sampler import Ids, windowed_order
from snclr.data.shards.index import ShardIndex
from snclr.errors import UserError

WINDOW = 16
"""Number of remote shards from which the images of an epoch are mixed at a time."""
START = 4
"""Number of remote shards at the beginning of an epoch, so that the first step waits for few downloads."""
PREFETCH = 2
"""Number of remote shards downloaded before they are needed."""

_MAX_IMAGE_BYTES = 2**28


@dataclass(eq=False)
class ShardDataset(ImageDataset):
    """Images in shards, read through an index; remote shards need a `cache`."""

    name: str
    shards: Sequence[Path | RemoteShard]
    index: ShardIndex
    digest: str
    cache: ShardCache | None = None
    unique_names: bool = False
    """Whether keys are the names in the index; otherwise they include the shard's name."""

    def __post_init__(self) -> None:
        if not len(self.index):
            raise UserError(f"there are no images in the shards of {self.name}")
        self.remote = self.cache is not None
        self.classes = self.index.classes or None
        self.labels = self.index.label if self.classes else None
        self._order: tuple[tuple[int, int], Ids] | None = None  # of the current (seed, epoch)
        self._sequence = np.arange(len(self.shards))  # order of the shards in that epoch
        self._visited: set[int] = set()  # remote shards whose successors were prefetched
        self._prefetcher: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None, "_visited": set(), "_prefetcher": None}

    def __len__(self) -> int:
        return len(self.index)

    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Decode one image, uint8 (H, W, 3) RGB; raises BadImage."""
        return decode_stream(io.BytesIO(self.read(index)), min_side)

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of one image; raises BadImage if they are incomplete."""
        size, offset = int(self.index.size[index]), int(self.index.offset[index])
        if size > _MAX_IMAGE_BYTES:
            raise BadImage(f"has {size:,} bytes, more than {_MAX_IMAGE_BYTES:,}")
        try:
            data = self._read(int(self.index.shard[index]), size, offset)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror or error}") from error
        if len(data) < size:
            raise BadImage("the shard ends inside it")
        return data

    def key(self, index: int) -> str:
        """Return the original file name for shards of `snclr pack`, else `shard/member`."""
        name = self.index.names[index].encode("utf-8", "backslashreplace").decode()
        return name if self.unique_names else f"{self.shards[int(self.index.shard[index])].name}/{name}"

    def fingerprint(self) -> str:
        """Return a digest of the manifest's hashes, or of the index if there is no manifest."""
        return self.digest

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """Return the permutation (n,) of one epoch: of all images if local, through a window of shards if remote."""
        if self._order is None or self._order[0] != (seed, epoch):
            window = WINDOW if self.remote else len(self.shards)
            order, self._sequence = windowed_order(self.index.shard, len(self.shards), seed, epoch, window, START)
            order.setflags(write=False)
            self._order = (seed, epoch), order
            self._visited.clear()
        return self._order[1]

    def _read(self, shard: int, size: int, offset: int) -> bytes:
        source = self.shards[shard]
        if isinstance(source, Path):
            with open(source, "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        assert self.cache is not None
        data = self.cache.read(source, size, offset)
        if shard not in self._visited:
            self._visited.add(shard)
            if self._prefetcher is None or not self._prefetcher.is_alive():
                self._prefetcher = threading.Thread(target=self._prefetch, args=(shard, self.cache), daemon=True)
                self._prefetcher.start()
        return data

    def _prefetch(self, shard: int, cache: ShardCache) -> None:
        """Download the next shards of the epoch. A failure is reported by the read that needs the shard."""
        position = int(np.flatnonzero(self._sequence == shard)[0])
        for upcoming in self._sequence[position + 1 : position + 1 + PREFETCH].tolist():
            source = self.shards[upcoming]
            assert isinstance(source, RemoteShard)
            try:
                cache.fetch(source, wait=False)
            except Exception:
                return
