"""Where the files lie inside a tar: headers alone are read, nothing is ever unpacked.

Our own reader, since it must give offsets, be quick for millions of members, and end on any input: the headers of a tar
are untrusted, and a size or a long name in them may claim anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
# Links, devices, folders, pipes: they have a header and no content, whatever size they claim.
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")
_MAX_NAME = 2**16
_MAX_PAX = 2**20
_MAX_SIZE = 2**62
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

ReadAt = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A regular file in a tar: its content is `size` bytes from `offset`."""

    name: str
    offset: int
    size: int


class DamagedTar(Exception):
    """The bytes are no tar, or stop being one; the message says where and how."""


def read_members(read_at: ReadAt, size: int) -> Iterator[Member]:
    """Yield the regular files of a tar of `size` bytes in their order; links, folders and devices are passed over.

    The last one may reach beyond the end of a cut-off tar. `read_at(offset, length)` gives bytes.
    """
    position, long_name, extended = 0, None, dict[str, bytes]()
    while position + _BLOCK <= size:
        header = read_at(position, _BLOCK)
        if len(header) < _BLOCK:
            raise DamagedTar(f"ends inside the header at byte {position}")
        if header == bytes(_BLOCK):
            return
        if position == 0:
            _refuse_compressed(header)
        _check_sum(header, position)
        kind, content = header[156:157], position + _BLOCK
        length = _number(header[124:136], position)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            if length > (_MAX_PAX if kind in (_PAX, _PAX_GLOBAL) else _MAX_NAME):
                raise DamagedTar(f"has a name or attribute of {length} bytes at byte {position}")
            data = read_at(content, length)
            if kind == _LONG_NAME:
                long_name = data.rstrip(b"\0")
            elif kind == _PAX:
                extended = _pax(data, position)
        elif kind in _EMPTY:
            length, long_name, extended = 0, None, {}
        else:
            if "size" in extended:
                length = _decimal(extended["size"], position)
            if length >= _MAX_SIZE:
                raise DamagedTar(f"claims a file of {length} bytes at byte {position}")
            if kind in _REGULAR and not any(key.startswith("GNU.sparse") for key in extended):
                name = extended.get("path") or long_name or _name(header)
                if not name.endswith(b"/"):  # the old way to mark a folder
                    yield Member(name.decode("utf-8", "surrogateescape"), content, length)
            long_name, extended = None, {}
        position = content + -(-length // _BLOCK) * _BLOCK  # always forward: lengths are never negative


def read_file_members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """Yield the regular files of a tar on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield from read_members(lambda offset, length: os.pread(fd, length, offset), os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _refuse_compressed(header: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            raise DamagedTar(
                f"is compressed with {name}; images gain nothing by that, and shards are read in any order: "
                "decompress it to a plain .tar"
            )


def _check_sum(header: bytes, position: int) -> None:
    """The header's sum is taken with the sum's own field as blanks; some old writers took bytes as signed."""
    try:
        said = _number(header[148:156], position)
    except DamagedTar:
        said = -1
    found = sum(header) - sum(header[148:156]) + 8 * 32
    if said != found and said != found - 256 * sum(byte > 127 for byte in header[:148] + header[156:]):
        raise DamagedTar(f"has no tar header at byte {position}")


def _number(field: bytes, position: int) -> int:
    """Octal text, or for large files the binary form that starts with 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0].strip()
    if text and not all(48 <= digit < 56 for digit in text):
        raise DamagedTar(f"has a header with a wrong number at byte {position}")
    return int(text or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax(data: bytes, position: int) -> dict[str, bytes]:
    """The records of an extended header, each `length key=value\\n`."""
    found: dict[str, bytes] = {}
    while data.rstrip(b"\0"):
        digits = data.partition(b" ")[0]
        length = _decimal(digits, position)
        record = data[len(digits) + 1 : length - 1]
        key, equals, value = record.partition(b"=")
        if not equals or length > len(data) or length <= len(digits) + 1:
            raise DamagedTar(f"has a wrong extended header at byte {position}")
        found[key.decode("utf-8", "replace")] = value
        data = data[length:]
    return found


def _decimal(text: bytes, position: int) -> int:
    if not text.isdigit() or len(text) > 19:
        raise DamagedTar(f"has a wrong number in an extended header at byte {position}")
    return int(text)
