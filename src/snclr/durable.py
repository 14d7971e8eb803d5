"""Disk writes that a crash or a full disk leaves old or new, never half, and a lock that dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from snclr.errors import UserError

PARTIAL = ".partial"
"""Ending of a file or folder being written or deleted; without a living writer it is rubbish."""

_log = logging.getLogger(__name__)


def partial_path(path: Path) -> Path:
    """A new hidden name beside `path`, so that a later rename stays within one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")


def is_partial(path: Path) -> bool:
    """Whether the name is one of `partial_path`."""
    return path.name.startswith(".") and path.name.endswith(PARTIAL)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`: os.write may take only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no fsync for folders; they order such changes themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def explain_full_disk(path: Path, bytes_needed: int) -> Iterator[None]:
    """Turn "no space left" or "quota exceeded" inside the block into a UserError with the path and bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        raise UserError(
            f"no space to write {path} ({error.strerror}): {bytes_needed:,} bytes needed,"
            f" {shutil.disk_usage(place).free:,} free on that disk."
            " What was saved earlier is intact; free some space and give the same command again"
            " (snclr pretrain: with --resume)."
        ) from error


@contextlib.contextmanager
def explain_unwritable(path: Path, advice: str) -> Iterator[None]:
    """Turn any error of the disk inside the block into a UserError with the path, the reason and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}); {advice}") from error


def check_writable(path: Path, advice: str) -> None:
    """UserError where no file can be written at `path`: asked before hours of computing, not after.

    It is tried, since permissions do not tell of a read-only disk; nothing is left behind.
    """
    path = path.absolute()
    missing = [folder for folder in path.parents if not folder.exists()]
    with explain_unwritable(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = partial_path(path)
        probe.touch(exist_ok=False)
        probe.unlink()
    with contextlib.suppress(OSError):  # another process may already write there
        for folder in missing:
            folder.rmdir()


def write_atomic(path: Path | str, content: str | bytes) -> None:
    """Write a small file so that a crash at any moment leaves the old content or the new one, never a part.

    >>> import tempfile; place = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_atomic(place, "hello"); place.read_text()
    'hello'
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, len(data)) as file:
        write_all(file.fileno(), data)


@contextlib.contextmanager
def replacing(path: Path | str, size: int) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, for what is too large to hold twice.

    `size` is about how many bytes it will have, for the message of a full disk.
    """
    path = Path(path)
    partial = partial_path(path)
    with explain_full_disk(path, size):
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        fsync_folder(path.parent)


def discard(path: Path) -> None:
    """Delete a file or folder; it is gone from its name in one step, and a link is removed, never followed."""
    partial = partial_path(path)
    os.rename(path, partial)
    remove_partial(partial)


def remove_partial(path: Path) -> None:
    """Delete what an interrupted write or deletion left behind; another process may be at it too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_already_gone)
    else:
        path.unlink(missing_ok=True)


def _already_gone(function: Callable[..., object], path: str, found: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(found[1], FileNotFoundError):
        raise found[1]


def sweep(path: Path) -> None:
    """Delete what interrupted writes and deletions of `path` left beside it: for the one who holds its lock."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        remove_partial(left)


class FileLock:
    """An flock on one file: let go by `release` or by the death of the process, however it dies; forks do not keep it.

    On file systems without locks it warns and goes on with `held` False, since refusing would make them unusable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False
        self._fd: int | None = None

    def acquire(self, wait_seconds: float = 0.0) -> bool:
        """True unless somebody else holds the lock, even after `wait_seconds`."""
        assert self._fd is None, "already locked"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.held = True
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(0.05)
            except OSError as error:
                _log.warning("cannot lock %s (%s): a second writer would go unnoticed", self.path, error.strerror)
                break
        self._fd = fd
        _locks.add(self)
        return True

    def describe_holder(self) -> None:
        """Write who holds the lock into its file, for the message a second run gets."""
        assert self._fd is not None
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with explain_full_disk(self.path, 200):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode(), 0)

    def holder(self) -> str:
        """In words, who holds (or last held) the lock, as far as the file tells."""
        try:
            who = json.loads(self.path.read_bytes()[:1000])
            return f"process {int(who['pid'])} on {str(who['host'])!r} since {str(who['since'])!r}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"

    def release(self) -> None:
        """Let go; harmless when not locked."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self.held = None, False
            _locks.discard(self)


def lock_folder(lock: FileLock, doing: str, advice: str) -> None:
    """Make the folder of a lock and take the lock, or say why not: no permission, or another process is at it.

    `doing` says what the lock is for, and `advice` what to do where the folder cannot be written.
    """
    folder = lock.path.parent
    with explain_unwritable(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
        free = lock.acquire()
    if not free:
        raise UserError(f"{doing} is already under way ({lock.holder()}, in {folder}); wait for it")
    lock.describe_holder()


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    # A forked data worker shares the lock and would keep a killed run's folder locked for as long as it lives on.
    # Closing the child's copy leaves the parent's lock in place.
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_locks_in_child)
