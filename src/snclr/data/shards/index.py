"""The index of shards: shard, offset, size, label and name of each image, for random access.

It is read from the headers of tar files. They are untrusted: links, devices, directories and sparse files are skipped,
and sizes are checked before use.
"""

import io
import itertools
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from snclr.data.cache import cache_path, load_cached, save_cached
from snclr.data.decode import SUFFIXES
from snclr.data.labels import encode_labels, renumber_labels, sort_classes
from snclr.errors import UserError
from snclr.io.jsonl import parse_record

_log = logging.getLogger(__name__)
_BLOCK = tarfile.BLOCKSIZE
_MAX_HEADER = 2**20  # bytes of one long name or pax record
_MAX_SIZE = 2**62
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# The WebDataset convention: the key is the path up to the first dot of the file name; the rest is the member's type.
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_MAX_LABEL_BYTES = 65536
_COLUMNS = ("shard", "offset", "size", "label")
_JSON_LABELS = ("label", "cls", "class")
_VERSION = "1"  # part of the cache key; increase it when the rules in this module change


@dataclass(frozen=True, eq=False)
class PackedNames:
    """Concatenated strings: `text` uint8, `ends` int64 (n,). A list would take ten times the memory.

    Names that are not valid UTF-8 keep their bytes, as Python's file names do.

    >>> names = PackedNames.of(["a.jpg", "b/c.png"])
    >>> len(names), names[1]
    (2, 'b/c.png')
    """

    text: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        typed = self.text.dtype == np.uint8 and self.ends.dtype == np.int64 and self.text.ndim == self.ends.ndim == 1
        if not typed or (np.diff(self.ends, prepend=0) < 0).any() or self.ends[-1:].sum() != len(self.text):
            raise ValueError("the arrays of packed names are inconsistent")

    @classmethod
    def of(cls, names: Iterable[str]) -> "PackedNames":
        """Pack names."""
        parts = [name.encode("utf-8", "surrogateescape") for name in names]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # negative and out-of-range indices behave as in a list
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(eq=False)
class ShardIndex:
    """Index of n images; `shard`, `offset`, `size`, `label` int64 (n,). A label is an index into `classes`, or -1."""

    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    names: PackedNames
    classes: list[str]

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in _COLUMNS]
        if any(column.dtype != np.int64 or column.shape != (len(self.names),) for column in columns):
            raise ValueError("the columns of the index differ in length or type")
        if any((column < 0).any() for column in columns[:3]) or (self.offset | self.size >= _MAX_SIZE).any():
            raise ValueError("the index has invalid offsets or sizes")
        if (self.label < -1).any() or (self.label >= len(self.classes)).any():
            raise ValueError("the index has labels without a class")

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[tuple[int, int, int]],
        label: npt.NDArray[np.int64],
        names: Iterable[str],
        classes: list[str],
    ) -> "ShardIndex":
        """Build an index from one (shard, offset, size) per image."""
        shard, offset, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(shard, offset, size, label, PackedNames.of(names), classes)

    def to_bytes(self) -> bytes:
        """Serialize the index in the safetensors format."""
        from safetensors.numpy import save

        classes = PackedNames.of(self.classes)
        arrays = {name: getattr(self, name) for name in _COLUMNS}
        arrays |= {"names": self.names.text, "name_ends": self.names.ends}
        arrays |= {"classes": classes.text, "class_ends": classes.ends}
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "ShardIndex":
        """Check and parse the output of `to_bytes`; ValueError for anything else. Never executes code."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(data)
            shard, offset, size, label = (arrays[name] for name in _COLUMNS)
            names = PackedNames(arrays["names"], arrays["name_ends"])
            classes = PackedNames(arrays["classes"], arrays["class_ends"])
            return cls(shard, offset, size, label, names, [classes[i] for i in range(len(classes))])
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"not an index of shards: {error}") from error


def index_file(path: Path) -> ShardIndex:
    """Return the index of a tar on disk, from the cache if its size and modification time are unchanged."""
    status = path.stat()
    return index_shard(str(path.resolve()), f"{status.st_size} {status.st_mtime_ns}", lambda: path)


def index_shard(location: str, version: str, local_copy: Callable[[], Path]) -> ShardIndex:
    """Return the index of the shard at a path or URL, cached by its version; `local_copy` returns a file to scan."""
    cached = cache_path("shard-index", _VERSION, location, version)
    index = load_cached(cached, ShardIndex.from_bytes)
    if index is None:
        index = _scan(local_copy(), location)
        save_cached(cached, index.to_bytes())
    return index


def merge_indexes(indexes: Sequence[ShardIndex]) -> ShardIndex:
    """Concatenate the indexes of single shards, with the union of their classes."""
    classes = sort_classes(name for index in indexes for name in index.classes)
    starts = np.cumsum([0, *(len(index.names.text) for index in indexes[:-1])])
    ends = [index.names.ends + start for index, start in zip(indexes, starts, strict=True)]
    return ShardIndex(
        np.repeat(np.arange(len(indexes), dtype=np.int64), [len(index) for index in indexes]),
        np.concatenate([index.offset for index in indexes]),
        np.concatenate([index.size for index in indexes]),
        np.concatenate([renumber_labels(index.label, index.classes, classes) for index in indexes]),
        PackedNames(np.concatenate([index.names.text for index in indexes]), np.concatenate(ends)),
        classes,
    )


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


def _scan(path: Path, location: str) -> ShardIndex:
    try:
        with open(path, "rb") as file:
            images = list(_images(read_members(path), file.fileno()))
    except DamagedTar as error:
        raise UserError(f"the shard {location} {error}") from error
    except OSError as error:
        raise UserError(f"the shard {location} cannot be read: {error.strerror or error}") from error
    if images and images[-1][0].offset + images[-1][0].size > path.stat().st_size:
        _log.warning("the shard %s is truncated inside %s; that image counts as bad", location, images[-1][0].name)
    classes = sort_classes(label for _, label in images if label is not None)
    rows = [(0, member.offset, member.size) for member, _ in images]
    labels = encode_labels((label for _, label in images), classes)
    return ShardIndex.of_rows(rows, labels, (member.name for member, _ in images), classes)


def _images(members: Iterable[Member], fd: int) -> Iterator[tuple[Member, str | None]]:
    """Yield the images of a tar with their labels; consecutive members with the same key are one example."""
    named = (member._replace(name=member.name.removeprefix("./")) for member in members)
    # Not hidden, with a suffix, and inside of the archive.
    inside = (member for member in named if member.name[:1] != "/" and ".." not in member.name.split("/"))
    matches = ((match, member) for member in inside if (match := _KEY.fullmatch(member.name)))
    for _, example in itertools.groupby(matches, key=lambda pair: pair[0][1]):
        images, label = list[Member](), None
        for match, member in example:
            suffix = match[2].lower()
            if f".{suffix}".endswith(SUFFIXES):
                images.append(member)
            elif suffix == "cls" and member.size <= _MAX_LABEL_BYTES:
                label = _label(os.pread(fd, member.size, member.offset)) or label
            elif suffix == "json" and member.size <= _MAX_LABEL_BYTES and label is None:
                label = _json_label(os.pread(fd, member.size, member.offset))
        yield from ((image, label) for image in images)


def _label(data: bytes) -> str | None:
    """Return a label as text. Numbers lose leading zeros, so that 7 equals 007; negative numbers mean no label."""
    text = data.decode("utf-8", "replace").strip()
    if re.fullmatch(r"-[0-9]+", text):
        return None
    return str(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else text or None


def _json_label(data: bytes) -> str | None:
    fields = parse_record(data) or {}
    value = next((fields[name] for name in _JSON_LABELS if name in fields), None)
    is_label = isinstance(value, (int, str)) and not isinstance(value, bool)
    return _label(str(value).encode("utf-8", "replace")) if is_label else None
