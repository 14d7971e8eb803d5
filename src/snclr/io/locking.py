"""Exclusive locks between processes, based on `filelock`."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

import filelock

from snclr.errors import UserError
from snclr.io.atomic import explain_unwritable

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Error codes of flock on file systems without locks."""
_log = logging.getLogger(__name__)


class FileLock:
    """An exclusive lock on a file, released by `release` or when the process dies. Forked workers do not hold it.

    On a file system without locks `acquire` warns and returns True: refusing would make it unusable.
    The lock file is never deleted; otherwise two processes could lock two files of the same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: filelock.BaseFileLock | None = None  # made by `acquire`: a forked child cannot use its parent's

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock and write the holder into the file; return False if it is taken for `timeout` seconds."""
        self.path.touch()  # raises if the folder is missing or not writable
        self._lock = filelock.FileLock(self.path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=timeout)
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("cannot lock %s (%s): a second writer will not be detected", self.path, error.strerror)
            return True
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # the lock protects without it, even on a full disk
            self.path.write_text(json.dumps(holder))
        return True

    def is_held(self) -> bool:
        """Return whether a process holds the lock now; the file is not changed. False if this cannot be tested."""
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def holder(self) -> str:
        """Describe the process that holds the lock, as recorded in the file."""
        try:
            record = json.loads(self.path.read_bytes()[:1000])
            return f"process {int(record['pid'])} on {str(record['host'])!r} since {str(record['since'])!r}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._lock is not None:
            self._lock.release()


def lock_folder(lock: FileLock, task: str, advice: str) -> None:
    """Create the folder of a lock and take the lock.

    A UserError names the `task` if another process holds the lock, or gives `advice` if the folder is not writable.
    """
    folder = lock.path.parent
    with explain_unwritable(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
        free = lock.acquire()
    if not free:
        raise UserError(f"{task} is already running ({lock.holder()}, in {folder}). Wait until it has finished.")
