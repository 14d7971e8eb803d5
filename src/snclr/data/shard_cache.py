"""Copies of remote shards on this machine: fetched once by whichever process needs one first, the oldest given up."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from snclr.data.cache import cache_folder, cache_limit, cache_name
from snclr.data.remote import download
from snclr.durable import FileLock
from snclr.errors import UserError

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 4 * 3600.0  # for another process that fetches the same shard


@dataclass(frozen=True)
class RemoteShard:
    """A shard behind an address; `version` is the manifest's sha256 (`hashed`), else what the server says."""

    url: str
    size: int | None
    version: str
    hashed: bool


@dataclass(frozen=True)
class ShardCache:
    """A folder of shards with at most `limit` bytes, as far as that holds one shard."""

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

    def open_file(self, shard: RemoteShard) -> int:
        """Open the copy, fetched now where it is not there; a file descriptor, good even if the copy is given up."""
        while True:
            self.fetch(shard)
            try:
                path = self.place(shard)
                fd = os.open(path, os.O_RDONLY)
                os.utime(path)  # when it was last wanted: the order in which copies are given up
                return fd
            except FileNotFoundError:
                continue  # given up by another process in this very moment

    def fetch(self, shard: RemoteShard, *, wait: bool = True) -> bool:
        """Make sure the copy is there; False where another process fetches it and `wait` is not wanted."""
        path = self.place(shard)
        if path.exists():
            return True
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.acquire(_WAIT_SECONDS if wait else 0.0):
            if wait:
                raise UserError(f"{shard.url} is being fetched by {lock.holder()} for hours; end that process")
            return False
        try:
            if not path.exists():
                self._make_room(shard.size or 0)
                _log.info("fetching %s", shard.url)
                download(shard.url, path, size=shard.size, sha256=shard.version if shard.hashed else None)
        finally:
            lock.release()
        return True

    def _make_room(self, wanted: int) -> None:
        copies = []
        for path in self.folder.glob("*.tar"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            copies.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in copies) + wanted
        for _, size, path in sorted(copies):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size
