"""Results of `snclr curate`; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snclr.runtime.results import Result

MANY_DUPLICATES = 0.2
"""Share of near-duplicates above which the encoder is more likely the reason than the images."""


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

    @property
    def warnings(self) -> list[str]:
        """A warning if implausibly many images are near-duplicates."""
        if not self.groups or self.found <= MANY_DUPLICATES * self.images:
            return []
        return [
            f"{self.found / self.images:.0%} of the images is an implausible share of near-duplicates. The encoder may"
            " not tell your images apart yet: look at some groups, and raise --threshold."
        ]
