"""Results of `snclr explore`; free of torch."""

from dataclasses import dataclass

from snclr.runtime.results import Result


@dataclass(frozen=True)
class ExploreResult(Result):
    """The address that was served, or the folder that was written."""

    address: str | None
    folder: str | None = None
    files: int = 0
    bytes: int = 0
    images: int = 0
    """Images in the folder."""
