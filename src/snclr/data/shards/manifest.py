"""The manifest that `snclr pack` writes: names, sizes and hashes of the shards, and the index of all images."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.remote import read_remote, sibling
from snclr.data.shards.index import ShardIndex
from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.io.hashing import sha256_bytes
from snclr.io.jsonl import parse_record

MANIFEST = "shards.json"
INDEX = "index.safetensors"
SCHEMA = "snclr-shards/1"

# Names in a manifest become paths or URLs: only plain file names are allowed.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardEntry:
    """One shard: file name, size, hash and number of images."""

    name: str
    bytes: int
    sha256: str
    images: int

    @classmethod
    def parse(cls, entry: Any) -> "ShardEntry":
        """Check the JSON values of an entry; ValueError if they are invalid."""
        name, sha256 = _matching(_NAME, entry["name"]), _matching(_SHA256, entry["sha256"])
        return cls(name, _count(entry["bytes"]), sha256, _count(entry["images"]))


@dataclass(frozen=True)
class Manifest:
    """Shards with their index, which lists the images in the order of the packed folder."""

    shards: list[ShardEntry]
    index: ShardIndex

    def digest(self, *extra: str) -> str:
        """Return a hash that changes with any byte of any shard or of the index."""
        parts = [*extra, *(entry.sha256 for entry in self.shards), sha256_bytes(self.index.to_bytes())]
        return sha256_bytes("\0".join(parts).encode())


def write_manifest(folder: Path, manifest: Manifest, seed: int | None) -> None:
    """Write the index, then the manifest, which marks the set as complete.

    The seed of the shuffle over shards (None: not shuffled) is for the reader; no code depends on it.
    """
    index = manifest.index.to_bytes()
    write_atomic(folder / INDEX, index)
    content = {
        "schema": SCHEMA,
        "images": len(manifest.index),
        "classes": manifest.index.classes,
        "seed": seed,
        "index": {"name": INDEX, "bytes": len(index), "sha256": sha256_bytes(index)},
        "shards": [vars(entry) for entry in manifest.shards],
    }
    write_atomic(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(location: Path | str) -> Manifest:
    """Read a manifest and its index from a path or a URL (str); UserError if they are inconsistent."""
    parsed = parse_record(_read(location)) or {}
    schema = parsed.get("schema")
    if isinstance(schema, str) and schema != SCHEMA:
        raise UserError(f"{location} has the schema {schema!r}; this version reads {SCHEMA!r}")
    try:
        shards = [ShardEntry.parse(entry) for entry in parsed["shards"]]
        name, digest = _matching(_NAME, parsed["index"]["name"]), parsed["index"]["sha256"]
        images = _count(parsed["images"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{location} is not a manifest of `snclr pack`: {reason}") from error
    data = _read(location.parent / name if isinstance(location, Path) else sibling(location, name))
    try:
        if sha256_bytes(data) != digest:
            raise ValueError("wrong hash")
        index = ShardIndex.from_bytes(data)
        if len(index) != images or len(index) == 0 or int(index.shard.max()) >= len(shards):
            raise ValueError("different number of images or shards")
        sizes = np.array([min(entry.bytes, 2**62) for entry in shards], dtype=np.int64)
        if (index.offset + index.size > sizes[index.shard]).any():
            raise ValueError("offsets beyond the end of a shard")
    except ValueError as error:
        raise UserError(
            f"the index {name} of {location} does not match the manifest ({error}); copy or pack the set again"
        ) from error
    return Manifest(shards, index)


def _read(location: Path | str) -> bytes:
    if isinstance(location, str):
        return read_remote(location)
    try:
        return location.read_bytes()
    except OSError as error:
        raise UserError(f"{location} cannot be read: {error.strerror}") from error


def _count(value: Any) -> int:
    """Check an integer: JSON parses 1e999 and Infinity as floats."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{str(value)[:50]!r} is not a number of images or bytes")
    return value


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not pattern.fullmatch(str(value)):
        raise ValueError(f"{str(value)[:200]!r} is not a plain file name or hash")
    return str(value)
