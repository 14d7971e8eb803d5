"""Atomic file writes: after a crash or on a full disk a file has its old content or the new one, never a part."""

import contextlib
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from snclr.errors import UserError

PARTIAL = ".partial"
"""Suffix of files and folders that are being written or deleted. If no process works on them, they can be deleted."""


def partial_path(path: Path) -> Path:
    """Return a new hidden name beside `path`: a rename is atomic within one file system only."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")


def is_partial(path: Path) -> bool:
    """Whether the name was made by `partial_path`."""
    return path.name.startswith(".") and path.name.endswith(PARTIAL)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single os.write may write a part of it."""
    while data:
        data = memoryview(data)[os.write(fd, data) :]


def fsync_path(path: Path) -> None:
    """Sync a file, or the names inside a folder, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def explain_full_disk(path: Path, bytes_needed: int) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" inside the block into a UserError with the path and bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        raise UserError(
            f"no space to write {path} ({error.strerror}): {bytes_needed:,} bytes needed,"
            f" {shutil.disk_usage(folder).free:,} free on that disk."
            " Earlier files are intact. Free some space and run the same command again (snclr pretrain: with --resume)."
        ) from error


@contextlib.contextmanager
def explain_unwritable(path: Path, advice: str) -> Iterator[None]:
    """Turn any OSError inside the block into a UserError with the path, the reason and the advice.

    >>> with explain_unwritable(Path("/dev/null/a/b"), "choose another folder"):
    ...     Path("/dev/null/a").mkdir(parents=True)
    Traceback (most recent call last):
    snclr.errors.UserError: cannot write /dev/null/a/b (/dev/null is not a folder); choose another folder
    """
    try:
        yield
    except OSError as error:
        files = [f"{part} is not a folder" for part in path.parents if os.path.exists(part) and not part.is_dir()]
        reason = files[0] if files else error.strerror or error
        raise UserError(f"cannot write {path} ({reason}); {advice}") from error


def check_file_name(path: Path | str, suffixes: Sequence[str], *, flag: str = "--out") -> Path:
    """Return the path of a file to write; raise a UserError for another suffix than `suffixes` (if any) or a folder."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        end = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise UserError(f"{flag} {path} {end}; use {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; give the name of a file to write")
    return path


def check_writable(path: Path, advice: str, *, overwrite: bool = True) -> None:
    """Raise a UserError if no file can be created at `path`; call it before a long computation.

    It creates and deletes a file, because permissions do not show that a disk is read-only. Without `overwrite`, an
    existing file is an error.
    """
    if not overwrite and path.is_file():
        raise UserError(f"{path} exists. Choose another file, or replace it with --overwrite.")
    path = path.absolute()
    missing = [folder for folder in path.parents if not folder.exists()]
    with explain_unwritable(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = partial_path(path)
        probe.touch(exist_ok=False)
        probe.unlink()
    with contextlib.suppress(OSError):  # another process may have written there by now
        for folder in missing:
            folder.rmdir()


def write_atomic(path: Path | str, content: str | bytes) -> None:
    """Replace a file by one with this content.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_atomic(path, "hello"); path.read_text()
    'hello'
    """
    data = content.encode() if isinstance(content, str) else content
    with atomic_writer(path, len(data)) as file:
        write_all(file.fileno(), data)


@contextlib.contextmanager
def atomic_writer(path: Path | str, size: int) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends without an error, for content written in parts.

    A missing folder is created.
    `size` is its approximate size in bytes, for the error message on a full disk.
    """
    path = Path(path)
    partial = partial_path(path)
    with explain_full_disk(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
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
        fsync_path(path.parent)


def discard(path: Path) -> None:
    """Delete a file or folder. Its name disappears atomically; the target of a symbolic link is kept."""
    partial = partial_path(path)
    os.rename(path, partial)
    remove_partial(partial)


def remove_partial(path: Path) -> None:
    """Delete a partial file or folder; another process may do the same at the same time."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    while path.is_dir():  # rmtree stops at the first file that another process has deleted
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def remove_leftovers(path: Path) -> None:
    """Delete the partial files and folders of interrupted writes and deletions of `path`. The caller holds its lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        remove_partial(leftover)
