"""Results of `snclr curate`; free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CurateResult:
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
