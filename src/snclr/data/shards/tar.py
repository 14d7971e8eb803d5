"""List the files inside a tar shard from the headers alone, and write shards in the WebDataset layout.

Headers are untrusted: links, devices, directories and sparse files are skipped, and sizes are checked before use.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from snclr.io.atomic import atomic_writer

_BLOCK = tarfile.BLOCKSIZE
_MAX_HEADER = 2**20  # bytes of one long name or pax record
_MAX_SIZE = 2**62
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A regular file in a tar: `size` bytes from `offset`."""

    name: str
    offset: int
    size: int


class DamagedTar(Exception):
    """The file is not a tar, or is damaged; the message states where and how."""


class _HeaderFile(io.FileIO):
    """A file that refuses large reads: `tarfile` would read a header of any claimed size into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER:
            raise DamagedTar(f"has a name or attribute of {size} bytes at byte {self.tell() - _BLOCK}")
        return super().read(size) or b""


def read_members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """Yield the regular files of a tar in order; in a truncated tar, the last one may end beyond the file."""
    with _HeaderFile(os.fspath(path)) as file:
        length = os.fstat(file.fileno()).st_size
        if length < _BLOCK:
            return
        start = file.read(8)
        if method := next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None):
            raise DamagedTar(
                f"is compressed with {method}, which does not allow random access; decompress it to a plain .tar"
            )
        file.seek(0)
        position = 0
        try:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
                while position + _BLOCK <= length and (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # memory stays constant for millions of members
                    if not 0 <= member.size < _MAX_SIZE:
                        raise DamagedTar(f"claims a file of {member.size} bytes at byte {member.offset}")
                    if tar.offset <= position:
                        raise DamagedTar(f"has a header that points backward at byte {member.offset}")
                    position = tar.offset
                    if member.isreg() and not member.issparse():
                        yield Member(member.name, member.offset_data, member.size)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedTar(f"has no valid tar header at byte {position} ({error})") from error
        # `tarfile` treats an invalid header after the first one as the end of the archive.
        file.seek(min(position, length))
        block = file.read(_BLOCK)
        if len(block) == _BLOCK and block != bytes(_BLOCK):
            raise DamagedTar(f"has no valid tar header at byte {position}")


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (name, content) pairs as a tar, atomically; its bytes depend on them alone."""
    with (
        atomic_writer(path, 0) as file,
        tarfile.open(
            fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as tar,
    ):
        for name, content in members:
            info = tarfile.TarInfo(name)  # without time and owner
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
