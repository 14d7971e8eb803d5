"""The base of the results that public functions return."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Result:
    """A dataclass that the command line prints, or writes as JSON."""

    def to_dict(self: DataclassInstance) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
