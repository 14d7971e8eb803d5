"""The index of shards: for each image its shard, place, label and name. With it any image is one read away."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from snclr.data.cache import cache_folder, cache_name, seal, unseal
from snclr.data.decode import SUFFIXES
from snclr.data.packed import Arrays, PackedNames
from snclr.data.tar_members import DamagedTar, Member, read_file_members
from snclr.errors import UserError

_log = logging.getLogger(__name__)
# WebDataset's rule: the key is the path up to the first dot of the file's name; what follows says what the member is.
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_LABEL_BYTES = 65536
_JSON_LABELS = ("label", "cls", "class")
_VERSION = "1"  # part of the cached files' names: raise it when the rules above change


@dataclass(eq=False)
class ShardIndex:
    """n images in shards; `shard`, `offset`, `size`, `label` int64 (n,); a label is a number in `classes`, or -1."""

    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    names: PackedNames
    classes: list[str]

    def __post_init__(self) -> None:
        columns = (self.shard, self.offset, self.size, self.label)
        if any(column.dtype != np.int64 or column.shape != (len(self.names),) for column in columns):
            raise ValueError("the columns of the index do not fit together")
        if any((column < 0).any() for column in columns[:3]) or (self.offset | self.size >= 2**62).any():
            raise ValueError("the index has impossible places")
        if (self.label < -1).any() or (self.label >= len(self.classes)).any():
            raise ValueError("the index has labels without a class")

    def __len__(self) -> int:
        return len(self.names)

    def arrays(self) -> Arrays:
        """As plain arrays, for a file; `from_arrays` is the way back."""
        classes = PackedNames.of(self.classes)
        return {
            **{"shard": self.shard, "offset": self.offset, "size": self.size, "label": self.label},
            **{"names": self.names.text, "name_ends": self.names.ends},
            **{"classes": classes.text, "class_ends": classes.ends},
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> ShardIndex:
        """Check and take what `arrays` gave; ValueError where it does not fit together."""
        try:
            shard, offset, size, label = (arrays[name] for name in ("shard", "offset", "size", "label"))
            names = PackedNames(arrays["names"], arrays["name_ends"])
            classes = PackedNames(arrays["classes"], arrays["class_ends"])
        except KeyError as error:
            raise ValueError(f"the index has no {error}") from error
        return cls(shard, offset, size, label, names, list(classes))


class _Row(NamedTuple):
    member: Member
    label: str | None


def index_shard(path: Path) -> ShardIndex:
    """Index one tar on disk by its headers, or take the cached index where its size and time are the same."""
    status = path.stat()
    place, state = str(path.resolve()), f"{status.st_size} {status.st_mtime_ns}"
    return cached_index(place, state) or index_copy(path, place, state)


def cached_index(place: str, state: str) -> ShardIndex | None:
    """The index that was kept of a shard at a path or an address in that state (size and time or version)."""
    cached = _cached(place, state)
    arrays = None if cached is None else unseal(cached)
    try:
        return None if arrays is None else ShardIndex.from_arrays(arrays)
    except ValueError as error:
        _log.warning("the cache %s is damaged (%s); it is made again", cached, error)
        return None


def index_copy(path: Path, place: str, state: str) -> ShardIndex:
    """Index a tar on disk that is, or is a copy of, the shard at `place`, and keep the index."""
    index = _scan(path, place)
    if (cached := _cached(place, state)) is not None:
        seal(cached, index.arrays())
    return index


def _cached(place: str, state: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "shard-index" / f"{cache_name(_VERSION, place, state)}.index"


def merge(indexes: Sequence[ShardIndex]) -> ShardIndex:
    """Put the indexes of single shards together; classes are numbered anew, by all their names."""
    classes = sort_classes({name for index in indexes for name in index.classes})
    place = {name: number for number, name in enumerate(classes)}
    labels = []
    for index in indexes:
        table = np.array([place[name] for name in index.classes] + [-1], dtype=np.int64)  # last: label -1
        labels.append(table[index.label])
    ends, total = [], 0
    for index in indexes:
        ends.append(index.names.ends + total)
        total += len(index.names.text)
    return ShardIndex(
        np.repeat(np.arange(len(indexes), dtype=np.int64), [len(index) for index in indexes]),
        np.concatenate([index.offset for index in indexes]),
        np.concatenate([index.size for index in indexes]),
        np.concatenate(labels),
        PackedNames(np.concatenate([index.names.text for index in indexes]), np.concatenate(ends)),
        classes,
    )


def sort_classes(names: Iterable[str]) -> list[str]:
    """Sort label names: as numbers when all are.

    >>> sort_classes(["10", "9"]), sort_classes(["10", "9", "x"])
    (['9', '10'], ['10', '9', 'x'])
    """
    names = set(names)
    if not all(name.isascii() and name.isdigit() for name in names):
        return sorted(names)
    # By length, then by digits, which is the order of numbers without making any: Python refuses those of 5,000 digits.
    return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))


def _scan(path: Path, shown: str) -> ShardIndex:
    try:
        with open(path, "rb") as file:
            rows = list(_rows(read_file_members(path), file.fileno()))
    except DamagedTar as error:
        raise UserError(f"the shard {shown} {error}") from error
    except OSError as error:
        raise UserError(f"the shard {shown} cannot be read: {error.strerror or error}") from error
    if rows and rows[-1].member.offset + rows[-1].member.size > path.stat().st_size:
        _log.warning("the shard %s is cut off inside %s; that image is counted as bad", shown, rows[-1].member.name)
    classes = sort_classes({row.label for row in rows if row.label is not None})
    place = {name: number for number, name in enumerate(classes)}
    return ShardIndex(
        np.zeros(len(rows), dtype=np.int64),
        np.array([row.member.offset for row in rows], dtype=np.int64),
        np.array([row.member.size for row in rows], dtype=np.int64),
        np.array([-1 if row.label is None else place[row.label] for row in rows], dtype=np.int64),
        PackedNames.of(row.member.name for row in rows),
        classes,
    )


def _rows(members: Iterable[Member], fd: int) -> Iterator[_Row]:
    """The images of a tar with their labels: members that follow each other under one key belong together."""
    key, images, label = None, list[Member](), None
    for member in members:
        name = member.name.removeprefix("./")
        match = _KEY.fullmatch(name)
        if match is None or name.startswith("/") or ".." in name.split("/"):
            continue  # hidden, without an ending, or pointing outside: not a part of the set
        if match[1] != key:
            yield from (_Row(image, label) for image in images)
            key, images, label = match[1], [], None
        ending = match[2].lower()
        if f".{ending}".endswith(SUFFIXES):
            images.append(member._replace(name=name))
        elif ending == "cls" and member.size <= _LABEL_BYTES:
            label = _plain(os.pread(fd, member.size, member.offset)) or label
        elif ending == "json" and member.size <= _LABEL_BYTES and label is None:
            label = _from_json(os.pread(fd, member.size, member.offset))
    yield from (_Row(image, label) for image in images)


def _plain(data: bytes) -> str | None:
    """A label as text; a number loses its leading zeros, so that 7 and 007 are one class; below 0 is unknown."""
    text = data.decode("utf-8", "replace").strip()
    if re.fullmatch(r"-[0-9]+", text):
        return None
    return str(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else text or None


def _from_json(data: bytes) -> str | None:
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found = (
        next((content[name] for name in _JSON_LABELS if name in content), None) if isinstance(content, dict) else None
    )
    plain = isinstance(found, (int, str)) and not isinstance(found, bool)
    return _plain(str(found).encode("utf-8", "replace")) if plain else None
