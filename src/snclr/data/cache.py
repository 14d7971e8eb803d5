"""The cache folder: indexes of large datasets and copies of remote shards. It may be deleted at any time.

Copies of shards are shared by all processes of a machine. fsspec's `filecache` has no size limit, no hash check and no
lock between processes, so two workers would download the same shard twice.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from snclr.data.remote import download, file_name
from snclr.errors import UserError
from snclr.io.atomic import explain_unwritable, write_atomic
from snclr.io.hashing import sha256_bytes, sha256_text
from snclr.io.locking import FileLock
from snclr.runtime.memory import parse_bytes

ValueT = TypeVar("ValueT")

_log = logging.getLogger(__name__)
_DEFAULT_LIMIT = "200GB"
_LOCK_TIMEOUT_SECONDS = 4 * 3600.0  # for another process that downloads the same shard
_TOUCH_SECONDS = 10.0  # precision of the time of last use
_ABANDONED_SECONDS = 3600.0  # without a write, a partial download is left over from a killed process


def cache_folder() -> Path | None:
    """Return SNCLR_CACHE, else `snclr` in $XDG_CACHE_HOME or ~/.cache; None if SNCLR_CACHE is `off`."""
    value = os.environ.get("SNCLR_CACHE", "")
    if value.lower() == "off":
        return None
    return Path(value).expanduser() if value else user_cache()


def user_cache() -> Path:
    """Return `snclr` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snclr"


def cache_path(kind: str, *key: str) -> Path | None:
    """Return the path of a cache entry of one kind, named by a hash of its key; None without a cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / kind / cache_name(*key)


def cache_name(*key: str) -> str:
    """Return a file name for a key of any length and content."""
    return sha256_text("\0".join(key))[:32]


def save_cached(path: Path | None, data: bytes) -> None:
    """Write a cache entry with its hash, atomically; a cache that is not writable gives a warning."""
    if path is None:
        return
    try:
        write_atomic(path, sha256_bytes(data).encode() + b"\n" + data)
    except (OSError, UserError) as error:
        _log.warning("the index %s cannot be written (%s); it will be built again next time", path, error)


def load_cached(path: Path | None, parse: Callable[[bytes], ValueT]) -> ValueT | None:
    """Parse what `save_cached` wrote; None if it does not exist, or, with a warning, if it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
        if digest != sha256_bytes(data).encode():
            raise ValueError("wrong hash")
        return parse(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        _log.warning("the index %s is damaged (%s); it will be built again", path, error)
        return None


@dataclass(frozen=True)
class RemoteShard:
    """A shard at a URL; `version` is its sha256 from the manifest if `hashed`, else the ETag or modification time."""

    url: str
    size: int | None
    version: str
    hashed: bool

    @property
    def name(self) -> str:
        """The file name in the URL."""
        return file_name(self.url)


@dataclass(frozen=True)
class ShardCache:
    """A folder of at most `limit` bytes of shards (but at least one shard), with least-recently-used eviction.

    Files are opened for each read: an evicted file that is still open would keep its space on the disk.
    """

    folder: Path
    limit: int

    @classmethod
    def open(cls, dataset: str) -> "ShardCache":
        """Open the cache of SNCLR_CACHE_SIZE bytes (default 200 GB) in the cache folder; errors name `dataset`."""
        top = cache_folder()
        if top is None:
            raise UserError(
                f"{dataset} is remote and needs the cache, but SNCLR_CACHE is off; set SNCLR_CACHE to a folder"
            )
        with explain_unwritable(top, "set SNCLR_CACHE to another folder"):
            (top / "shards").mkdir(parents=True, exist_ok=True)
        limit = parse_bytes(os.environ.get("SNCLR_CACHE_SIZE") or _DEFAULT_LIMIT, "SNCLR_CACHE_SIZE")
        return cls(top / "shards", limit)

    def path(self, shard: RemoteShard) -> Path:
        """Return the path of the local copy."""
        return self.folder / f"{cache_name(shard.url, shard.version, str(shard.size))}.tar"

    def read(self, shard: RemoteShard, size: int, offset: int) -> bytes:
        """Read from the local copy, downloading it first if needed; fewer bytes at the end of the file."""
        while True:
            try:
                with open(self.path(shard), "rb", buffering=0) as file:
                    fd = file.fileno()
                    if abs(time.time() - os.fstat(fd).st_mtime) > _TOUCH_SECONDS:  # mtime = last use, for eviction
                        os.utime(fd)
                    return os.pread(fd, size, offset)
            except FileNotFoundError:  # not downloaded yet, or just evicted by another process
                self.fetch(shard)

    def fetch(self, shard: RemoteShard, *, wait: bool = True) -> Path:
        """Return the path of the local copy, downloaded if needed.

        Without `wait`, it does not wait for another process that downloads it, so the file may be missing.
        """
        path = self.path(shard)
        if path.exists():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)  # the cache may be deleted at any time
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.acquire(_LOCK_TIMEOUT_SECONDS if wait else 0.0):
            if wait:
                raise UserError(f"{lock.holder()} has been downloading {shard.url} for hours; end that process")
            return path
        try:
            if not path.exists():
                self._evict(shard.size or 0)
                _log.info("downloading %s", shard.url)
                sha256 = shard.version if shard.hashed else None
                download(shard.url, path, size=shard.size, sha256=sha256, timeout=None if wait else 0.0)
                self._evict(0, keep=path)  # another process may have added a shard meanwhile
        finally:
            lock.release()
        return path

    def _evict(self, needed: int, keep: Path | None = None) -> None:
        """Delete the least recently used shards until `needed` bytes fit, but no running downloads."""
        files = []
        for path in self.folder.glob("*.tar*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files) + needed
        for modified, size, path in sorted(files):
            if total <= self.limit:
                return
            running = path.suffix == ".partial" and time.time() - modified < _ABANDONED_SECONDS
            if path != keep and not running:
                path.unlink(missing_ok=True)
                total -= size
