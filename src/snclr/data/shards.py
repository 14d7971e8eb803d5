"""Shards: tar files of images as WebDataset has them, here or behind an address, read by index in any order.

The index gives each image's place, so a shard source is like any other: order, views, resume, ranks and workers are
those of the rest. Shards on disk are shuffled as one set. Remote ones are read shard after shard, through a window.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import threading
import urllib.parse
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.decode import BadImage, Picture, decode_stream
from snclr.data.order import Ids, windowed_order
from snclr.data.patience import map_in_threads
from snclr.data.remote import check_address, is_address, list_remote, remote_state, sibling
from snclr.data.shard_cache import RemoteShard, ShardCache
from snclr.data.shard_index import ShardIndex, cached_index, index_copy, index_shard, merge
from snclr.data.shard_manifest import MANIFEST, Manifest, read_manifest
from snclr.data.shard_names import expand_braces
from snclr.data.sources import Labels
from snclr.errors import UserError
from snclr.progress import Progress

WINDOW = 16
"""From how many remote shards at a time the images of an epoch are mixed."""
START = 4
"""From how many at its beginning: so many are fetched before the first step, or a few more for a large batch."""

_log = logging.getLogger(__name__)
_OPEN_FILES = 128  # of shards on this disk
_KNOWN = 128  # remote shards whose followers were fetched
_AHEAD = 2  # remote shards that are fetched before they are needed
_MAX_IMAGE_BYTES = 2**28


@dataclass(frozen=True)
class Shard:
    """One tar: a `path` here, or a copy of something `remote`. `shown` is its name for people."""

    shown: str
    path: Path | None = None
    remote: RemoteShard | None = None


class ShardSource:
    """Images in shards, by an index. Files are opened where they are used, so it can be sent to workers."""

    def __init__(
        self,
        name: str,
        shards: list[Shard],
        index: ShardIndex,
        *,
        digest: str,
        cache: ShardCache | None = None,
        own_names: bool = False,
    ) -> None:
        if not len(index):
            raise UserError(f"there are no images in the {len(shards)} shards of {name}")
        self.name = name
        self.labels: Labels | None = index.label if index.classes else None
        self.classes: list[str] | None = index.classes or None
        self.remote = cache is not None
        self._shards = shards
        self._index = index
        self._cache = cache
        self._own_names = own_names  # names are unique as they are, without the shard's
        self._digest = digest
        self._sequence = np.arange(len(shards))
        self._open_nothing()

    def _open_nothing(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, int] = OrderedDict()
        self._met: deque[int] = deque(maxlen=_KNOWN)
        self._fetcher: threading.Thread | None = None
        self._orders: OrderedDict[tuple[int, int], Ids] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_files", "_met", "_fetcher", "_orders")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_nothing()

    def __del__(self) -> None:
        for fd in getattr(self, "_files", {}).values():
            os.close(fd)

    def __len__(self) -> int:
        return len(self._index)

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Decode one image, uint8 (H, W, 3) RGB; raises BadImage."""
        return decode_stream(io.BytesIO(self.read(index)), min_side)

    def read(self, index: int) -> bytes:
        """The bytes of one image as they were stored; raises BadImage where there are not that many."""
        size, offset = int(self._index.size[index]), int(self._index.offset[index])
        if size > _MAX_IMAGE_BYTES:
            raise BadImage(f"has {size:,} bytes, more than {_MAX_IMAGE_BYTES:,}")
        try:
            data = self._read(int(self._index.shard[index]), size, offset)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror or error}") from error
        if len(data) < size:
            raise BadImage("the shard ends inside it")
        return data

    def key(self, index: int) -> str:
        """The file's own name where `snclr pack` wrote the shards; else shard and member."""
        name = self._index.names[index].encode("utf-8", "backslashreplace").decode()
        return name if self._own_names else f"{self._shards[int(self._index.shard[index])].shown}/{name}"

    def fingerprint(self) -> str:
        """A digest of the manifest's hashes, or of names, places and sizes where there is no manifest."""
        return self._digest

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """The order of one epoch (n,): of the whole set at once here, through a window of shards where it is remote."""
        if (seed, epoch) not in self._orders:
            window = WINDOW if self.remote else len(self._shards)
            order, sequence = windowed_order(self._index.shard, len(self._shards), seed, epoch, window, START)
            order.setflags(write=False)
            self._orders[seed, epoch] = order
            self._sequence = sequence  # what is fetched ahead
            self._met.clear()
            if len(self._orders) > 2:
                self._orders.popitem(last=False)
        return self._orders[seed, epoch]

    def _read(self, shard: int, size: int, offset: int) -> bytes:
        where = self._shards[shard]
        if where.remote is None:
            with self._lock:  # so that no other thread closes the file in between
                return os.pread(self._file(shard), size, offset)
        assert self._cache is not None
        data = self._cache.read(where.remote, size, offset)
        with self._lock:
            if shard not in self._met:
                self._met.append(shard)
                self._fetch_ahead(shard)
        return data

    def _file(self, shard: int) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        path = self._shards[shard].path
        assert path is not None
        fd = self._files[shard] = os.open(path, os.O_RDONLY)
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return fd

    def _fetch_ahead(self, shard: int) -> None:
        """Start to fetch what follows; a failure is left to the read that will need it."""
        if self._fetcher is not None and self._fetcher.is_alive():
            return
        place = int(np.flatnonzero(self._sequence == shard)[0])
        following = [self._shards[number].remote for number in self._sequence[place + 1 : place + 1 + _AHEAD].tolist()]
        self._fetcher = threading.Thread(target=self._fetch, args=(following,), daemon=True, name="snclr-shards")
        self._fetcher.start()

    def _fetch(self, shards: list[RemoteShard | None]) -> None:
        for shard in shards:
            try:
                if shard is not None and self._cache is not None:
                    self._cache.fetch(shard, wait=False)
            except Exception:
                return


def open_shards(spec: str | Path, *, name: str) -> ShardSource:
    """Open a folder or manifest of `snclr pack`, or tars by name, braces, `*` or address; `name` is what is shown."""
    text = str(spec)
    if text.lower().startswith("file://"):
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    if is_address(text):
        check_address(text)
        if text.endswith("/"):
            text += MANIFEST
        if _last_part(text) == MANIFEST:
            return _from_manifest(text, name)
        return _from_addresses(text, name)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return _from_manifest(path / MANIFEST, name)
        return _from_paths(sorted(path.glob("*.tar")), name)
    if path.name == MANIFEST:
        return _from_manifest(path, name)
    found: list[Path] = []
    for one in expand_braces(str(path)):
        matches = sorted(glob.glob(one)) if glob.has_magic(one) and not os.path.exists(one) else [one]
        found.extend(map(Path, matches))
    return _from_paths(found, name)


def _from_paths(paths: list[Path], name: str) -> ShardSource:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        said = f"{len(missing)} of its {len(paths)} shards do not exist, e.g. {', '.join(missing[:3])}"
        raise UserError(f"{name}: {said if missing else 'no shard has that name'}; check the path and the numbers")
    with ThreadPoolExecutor(max_workers=4) as pool:
        indexes = list(pool.map(index_shard, paths))
    index = merge(indexes)
    return ShardSource(name, [Shard(path.name, path) for path in paths], index, digest=_digest(index))


def _from_addresses(pattern: str, name: str) -> ShardSource:
    """Shards without a manifest: each is fetched once for its index, which is kept."""
    urls = list_remote(pattern) if "*" in pattern else expand_braces(pattern)
    if not urls:
        raise UserError(f"{name}: no shard has that name")
    for url in urls:
        check_address(url)
        if not _last_part(url).lower().endswith(".tar"):
            raise UserError(
                f"the address {url!r} is no shard; give .tar files, the {MANIFEST} that `snclr pack` wrote, or, ending "
                "in /, the folder it is in"
            )
    cache = ShardCache.open(name)
    states = map_in_threads(remote_state, urls)
    shards, indexes = [], []
    with Progress(f"indexing {name}", len(urls), unit="shards") as progress:
        for url, state in zip(urls, states, strict=True):
            remote = RemoteShard(url, state.size, state.version, hashed=False)
            indexes.append(_remote_index(remote, cache))
            shards.append(Shard(_last_part(url), remote=remote))
            progress.update(1)
    index = merge(indexes)
    _check_room(cache, shards, name)
    return ShardSource(name, shards, index, digest=_digest(index, *_order_kind(shards)), cache=cache)


def _remote_index(remote: RemoteShard, cache: ShardCache) -> ShardIndex:
    state = f"{remote.size} {remote.version}"
    known = cached_index(remote.url, state)
    if known is None:
        cache.fetch(remote)
        known = index_copy(cache.place(remote), remote.url, state)
    return known


def _from_manifest(place: Path | str, name: str) -> ShardSource:
    manifest = read_manifest(place)
    if isinstance(place, Path):
        shards = [Shard(entry.name, place.parent / entry.name) for entry in manifest.shards]
        _check_sizes(manifest, shards, name)
        return ShardSource(name, shards, manifest.index, digest=manifest.digest(), own_names=True)
    cache = ShardCache.open(name)
    shards = [
        Shard(entry.name, remote=RemoteShard(sibling(place, entry.name), entry.bytes, entry.sha256, hashed=True))
        for entry in manifest.shards
    ]
    _check_room(cache, shards, name)
    return ShardSource(
        name, shards, manifest.index, digest=manifest.digest(*_order_kind(shards)), cache=cache, own_names=True
    )


def _order_kind(shards: list[Shard]) -> list[str]:
    """A run cannot go on from shards here to the same ones elsewhere where the order would be another."""
    return [f"window {WINDOW} from {START}"] if len(shards) > WINDOW else []


def _check_room(cache: ShardCache, shards: list[Shard], name: str) -> None:
    """Say so where the cache cannot hold what is read at once: every shard would be fetched over and over."""
    sizes = sorted((shard.remote.size or 0 for shard in shards if shard.remote is not None), reverse=True)
    needed = sum(sizes[: WINDOW + 1 + _AHEAD])
    if needed > cache.limit:
        _log.warning(
            "%s: its images are mixed from %d shards at a time, up to %s bytes with those fetched ahead, and the cache "
            "keeps %s (SNCLR_CACHE_SIZE): shards will be fetched again and again; allow it more, or use smaller shards",
            name, min(len(sizes), WINDOW), f"{needed:,}", f"{cache.limit:,}",
        )  # fmt: skip


def _check_sizes(manifest: Manifest, shards: list[Shard], name: str) -> None:
    for entry, shard in zip(manifest.shards, shards, strict=True):
        assert shard.path is not None
        found = shard.path.stat().st_size if shard.path.is_file() else None
        if found != entry.bytes:
            said = "is missing" if found is None else f"has {found:,} bytes, not the {entry.bytes:,} of the manifest"
            raise UserError(
                f"{name}: the shard {shard.path} {said}; copy it again, or pack the folder again. "
                f"`snclr pack --verify {shard.path.parent}` checks every shard"
            )


def _last_part(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def _digest(index: ShardIndex, *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    columns: list[npt.NDArray[Any]] = [index.shard, index.offset, index.size, index.names.ends, index.names.text]
    for column in columns:
        digest.update(np.ascontiguousarray(column).tobytes())
    digest.update("\0".join(index.classes).encode("utf-8", "surrogateescape") + index.label.tobytes())
    return digest.hexdigest()
