"""Results of `snclr explore`; free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ExploreResult:
    """The address that was served, or the folder that was written."""

    address: str | None
    folder: str | None = None
    files: int = 0
    bytes: int = 0
    images: int = 0
    """Images in the folder."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
