"""The manifest that `snclr pack` writes beside its shards: names, sizes and hashes, and the index of all images."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.packed import arrays_from_bytes, arrays_to_bytes
from snclr.data.remote import read_remote, sibling
from snclr.data.shard_index import ShardIndex
from snclr.durable import write_atomic
from snclr.errors import UserError

MANIFEST = "shards.json"
INDEX = "index.safetensors"
SCHEMA = "snclr-shards/1"

# A name from a manifest becomes a path or an address: plain letters, one folder, never upwards.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file name, size and hash, and how many images are in it."""

    name: str
    bytes: int
    sha256: str
    images: int


@dataclass(frozen=True)
class Manifest:
    """A set of shards with its index, in the order of the names of its images."""

    shards: list[ShardEntry]
    index: ShardIndex
    seed: int | None
    """Of the shuffle over shards; None where the images lie in their own order."""

    def digest(self, *more: str) -> str:
        """What changes with any byte of any shard, or the index."""
        parts = [*more, *(entry.sha256 for entry in self.shards), _sha256(arrays_to_bytes(self.index.arrays()))]
        return _sha256("\0".join(parts).encode())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the index, then the manifest: the last file of a complete set."""
    index = arrays_to_bytes(manifest.index.arrays())
    write_atomic(folder / INDEX, index)
    content = {
        "schema": SCHEMA,
        "images": len(manifest.index),
        "classes": manifest.index.classes,
        "seed": manifest.seed,
        "index": {"name": INDEX, "bytes": len(index), "sha256": _sha256(index)},
        "shards": [vars(entry) for entry in manifest.shards],
    }
    write_atomic(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(place: Path | str) -> Manifest:
    """Read a manifest and its index, from a path or an address (str); UserError where they do not fit together."""
    content = _read(place)
    try:
        parsed = json.loads(content)
        if isinstance(parsed, dict) and isinstance(parsed.get("schema"), str) and parsed["schema"] != SCHEMA:
            raise UserError(f"{place} is of the schema {parsed['schema']!r}; this version reads {SCHEMA!r}")
        shards = [_entry(entry) for entry in parsed["shards"]]
        name, digest = str(parsed["index"]["name"]), str(parsed["index"]["sha256"])
        _check_name(name)
        images, seed = _count(parsed["images"]), parsed["seed"]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{place} is no manifest of shards as `snclr pack` writes it: {_said(error)}") from error
    data = _read(place.parent / name if isinstance(place, Path) else sibling(place, name))
    if _sha256(data) != digest:
        raise UserError(f"the index {name} beside {place} is not the one of the manifest; copy or pack the set again")
    try:
        index = ShardIndex.from_arrays(arrays_from_bytes(data))
        if len(index) != images or len(index) == 0 or int(index.shard.max()) >= len(shards):
            raise ValueError("it has other images or shards")
        sizes = np.array([min(entry.bytes, 2**62) for entry in shards], dtype=np.int64)
        if (index.offset + index.size > sizes[index.shard]).any():
            raise ValueError("it has places beyond the end of a shard")
    except ValueError as error:
        raise UserError(f"the index {name} beside {place} does not fit the manifest: {error}") from error
    return Manifest(shards, index, seed if isinstance(seed, int) else None)


def _read(place: Path | str) -> bytes:
    if isinstance(place, str):
        return read_remote(place)
    try:
        return place.read_bytes()
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from error


def _entry(entry: Any) -> ShardEntry:
    found = ShardEntry(str(entry["name"]), _count(entry["bytes"]), str(entry["sha256"]), _count(entry["images"]))
    _check_name(found.name)
    if not _SHA256.fullmatch(found.sha256):
        raise ValueError(f"wrong hash of {found.name}")
    return found


def _count(value: Any) -> int:
    """A whole number: JSON also knows 1e999 and Infinity."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{str(value)[:50]!r} is no number of images or bytes")
    return value


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} is not a plain file name")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
