"""A bounded on-disk cache of remote shards, shared by all processes of a machine.

fsspec's `filecache` has no size limit, no hash check and no lock between processes, so two workers would download the
same shard twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from snclr.data.cache import cache_folder, cache_name, shard_cache_bytes
from snclr.data.remote.files import download, file_name
from snclr.errors import UserError
from snclr.io.atomic import explain_unwritable
from snclr.io.locking import FileLock

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT_SECONDS = 4 * 3600.0  # for another process that downloads the same shard
_TOUCH_SECONDS = 10.0  # precision of the time of last use
_ABANDONED_SECONDS = 3600.0  # without a write, a partial download is left over from a killed process


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
    def open(cls, dataset: str) -> ShardCache:
        """Open the cache with the settings of the environment; `dataset` is named in errors."""
        top = cache_folder()
        if top is None:
            raise UserError(
                f"{dataset} is remote and needs the cache, but SNCLR_CACHE is off; set SNCLR_CACHE to a folder"
            )
        with explain_unwritable(top, "set SNCLR_CACHE to another folder"):
            (top / "shards").mkdir(parents=True, exist_ok=True)
        return cls(top / "shards", shard_cache_bytes())

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

    def fetch(self, shard: RemoteShard, *, wait: bool = True) -> None:
        """Download a shard unless it is cached; without `wait`, do not retry, nor wait for another process."""
        path = self.path(shard)
        if path.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # the cache may be deleted at any time
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.acquire(_LOCK_TIMEOUT_SECONDS if wait else 0.0):
            if wait:
                raise UserError(f"{lock.holder()} has been downloading {shard.url} for hours; end that process")
            return
        try:
            if not path.exists():
                self._evict(shard.size or 0)
                _log.info("downloading %s", shard.url)
                sha256 = shard.version if shard.hashed else None
                download(shard.url, path, size=shard.size, sha256=sha256, timeout=None if wait else 0.0)
                self._evict(0, keep=path)  # another process may have added a shard meanwhile
        finally:
            lock.release()

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
