"""The cache folder: indexes of large datasets and copies of remote shards. It may be deleted at any time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.io.hashing import sha256_bytes, sha256_text
from snclr.runtime.memory import parse_bytes

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_DEFAULT_LIMIT = "200GB"


def cache_folder() -> Path | None:
    """Return SNCLR_CACHE, else `snclr` in $XDG_CACHE_HOME or ~/.cache; None if SNCLR_CACHE is `off`."""
    value = os.environ.get("SNCLR_CACHE", "")
    if value.lower() == "off":
        return None
    return Path(value).expanduser() if value else user_cache()


def user_cache() -> Path:
    """Return `snclr` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snclr"


def cache_path(kind: str, *key: str) -> Path | None:
    """Return the path of a cache entry of one kind, named by a hash of its key; None without a cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / kind / cache_name(*key)


def cache_name(*key: str) -> str:
    """Return a file name for a key of any length and content."""
    return sha256_text("\0".join(key))[:32]


def shard_cache_bytes() -> int:
    """Return the maximum size in bytes of cached remote shards: SNCLR_CACHE_SIZE, default 200 GB."""
    return parse_bytes(os.environ.get("SNCLR_CACHE_SIZE") or _DEFAULT_LIMIT, "SNCLR_CACHE_SIZE")


def save_cached(path: Path | None, data: bytes) -> None:
    """Write a cache entry with its hash, atomically; a cache that is not writable gives a warning."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, sha256_bytes(data).encode() + b"\n" + data)
    except (OSError, UserError) as error:
        _log.warning("the index %s cannot be written (%s); it will be built again next time", path, error)


def load_cached(path: Path | None, parse: Callable[[bytes], Result]) -> Result | None:
    """Parse what `save_cached` wrote; None if it does not exist, or, with a warning, if it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
        if digest != sha256_bytes(data).encode():
            raise ValueError("wrong hash")
        return parse(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        _log.warning("the index %s is damaged (%s); it will be built again", path, error)
        return None
