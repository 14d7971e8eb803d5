"""Copies of remote shards on this machine: fetched once by whichever process needs one first, the oldest given up."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from snclr.data.cache import cache_folder, cache_limit, cache_name
from snclr.data.remote import download
from snclr.durable import FileLock
from snclr.errors import UserError

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 4 * 3600.0  # for another process that fetches the same shard
_TOUCH_SECONDS = 10.0  # how exactly the time of the last use is kept


@dataclass(frozen=True)
class RemoteShard:
    """A shard behind an address; `version` is the manifest's sha256 (`hashed`), else what the server says."""

    url: str
    size: int | None
    version: str
    hashed: bool


@dataclass(frozen=True)
class ShardCache:
    """A folder of shards with at most `limit` bytes, as far as that holds one shard.

    No copy is held open between two reads: one that is given up would keep its space on the disk until it is closed.
    """

    folder: Path
    limit: int

    @classmethod
    def open(cls, why: str) -> ShardCache:
        """The cache by the environment's settings; `why` names what needs it."""
        folder = cache_folder()
        if folder is None:
            raise UserError(
                f"{why} is kept in the cache folder while it is read, and SNCLR_CACHE is off; set SNCLR_CACHE to a "
                "folder with space for it"
            )
        folder = folder / "shards"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the cache folder {folder} cannot be made ({error.strerror}); set SNCLR_CACHE") from error
        return cls(folder, cache_limit())

    def place(self, shard: RemoteShard) -> Path:
        """Where the copy lies, or would."""
        return self.folder / f"{cache_name(shard.url, shard.version, str(shard.size))}.tar"

    def read(self, shard: RemoteShard, size: int, offset: int) -> bytes:
        """Read from the copy, fetched now where it is not there; fewer bytes where it ends before."""
        while True:
            path = self.place(shard)
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # not there yet, or given up by another process in this very moment
                self.fetch(shard)
                continue
            try:
                # When it was last wanted is the order in which copies are given up.
                if abs(time.time() - os.fstat(fd).st_mtime) > _TOUCH_SECONDS:
                    os.utime(fd)
                return os.pread(fd, size, offset)
            finally:
                os.close(fd)

    def fetch(self, shard: RemoteShard, *, wait: bool = True) -> bool:
        """Make sure the copy is there; without `wait`, False where another process fetches it, and no patience."""
        path = self.place(shard)
        if path.exists():
            return True
        self.folder.mkdir(parents=True, exist_ok=True)  # it may be deleted at any time
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.acquire(_WAIT_SECONDS if wait else 0.0):
            if wait:
                raise UserError(f"{shard.url} is being fetched by {lock.holder()} for hours; end that process")
            return False
        try:
            if not path.exists():
                self._make_room(shard.size or 0)
                _log.info("fetching %s", shard.url)
                sha256 = shard.version if shard.hashed else None
                download(shard.url, path, size=shard.size, sha256=sha256, patience=None if wait else 0.0)
                self._make_room(0, keep=path)  # another may have come in at the same time
        finally:
            lock.release()
        return True

    def _make_room(self, wanted: int, keep: Path | None = None) -> None:
        """Give up the copies that were not wanted for longest, until there is room for one of so many bytes."""
        copies = []
        for path in self.folder.glob("*.tar"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            copies.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in copies) + self._in_flight() + wanted
        for _, size, path in sorted(copies):
            if total <= self.limit:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size

    def _in_flight(self) -> int:
        """Bytes of what is being fetched; what a killed process left of a fetch is removed."""
        total = 0
        for path in self.folder.glob("*.tar.partial"):
            lock = FileLock(path.with_suffix("").with_suffix(".lock"))
            if lock.acquire():
                if lock.held:
                    path.unlink(missing_ok=True)
                lock.release()
            else:
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total
