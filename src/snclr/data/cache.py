"""The cache folder: indexes of large sets and copies of remote shards. All of it may be deleted at any time."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy.typing as npt

from snclr.data.packed import Arrays, arrays_from_bytes, arrays_to_bytes
from snclr.durable import write_atomic
from snclr.errors import UserError

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DEFAULT_LIMIT = "200GB"


def cache_folder() -> Path | None:
    """The folder named by SNCLR_CACHE, else `snclr` in $XDG_CACHE_HOME or ~/.cache; None with SNCLR_CACHE=off."""
    given = os.environ.get("SNCLR_CACHE", "")
    if given.lower() == "off":
        return None
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snclr"


def cache_limit() -> int:
    """How many bytes of remote shards are kept: SNCLR_CACHE_SIZE, else 200 GB."""
    return parse_bytes(os.environ.get("SNCLR_CACHE_SIZE") or _DEFAULT_LIMIT, "SNCLR_CACHE_SIZE")


def parse_bytes(text: str, what: str) -> int:
    """Read a size such as `512MB`, `1.5G` or `4096` (a K is 1,000 bytes); `what` names it in the error.

    >>> parse_bytes("512MB", "--shard-size")
    512000000
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
        if not 1 <= value < 2**62:
            raise ValueError
    except ValueError:
        raise UserError(f"{what} is {text!r}; give a number of bytes above 0, such as 4096, 512MB or 1.5GB") from None
    return int(value)


def seal(path: Path, arrays: Arrays) -> None:
    """Write arrays with their hash, whole or not at all; a cache that cannot be written is a warning, not an error."""
    data = arrays_to_bytes(arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    except (OSError, UserError) as error:
        _log.warning("the cache %s cannot be written (%s); the work will be done again next time", path, error)


def unseal(path: Path) -> dict[str, npt.NDArray[Any]] | None:
    """Read what `seal` wrote; None where there is nothing, or, with a warning, where it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("the cache %s cannot be read (%s); it is made again", path, error)
        return None
    digest, _, data = content.partition(b"\n")
    try:
        if digest != hashlib.sha256(data).hexdigest().encode():
            raise ValueError("its hash is wrong")
        return arrays_from_bytes(data)
    except ValueError as error:
        _log.warning("the cache %s is damaged (%s); it is made again", path, error)
        return None


def cache_name(*parts: str) -> str:
    """A file name for some text of any length and content."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
