"""Results of `snclr curate`; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snclr.runtime.results import Result


@dataclass(frozen=True)
class CurateResult(Result):
    """The written list: how many images were found, and the protocol by which."""

    find: str
    file: str
    keep: str | None
    found: int
    images: int
    groups: int | None
    """Groups of near-duplicates."""
    protocol: str
    entries: list[dict[str, Any]]
    """The first 20 entries: key and reason."""
    skipped: int
