"""The result of a detection evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DetectResult:
    """Average precision of a detector as recorded in results.jsonl; shares in [0, 1], None without objects."""

    kind: str
    time: str
    """When the result was recorded (ISO 8601, UTC)."""
    numbers: dict[str, float | None]
    """AP, AP50 and AP75 of boxes (_bb) and masks (_mk)."""
    protocol: str
    start: str
    """Where the initial weights come from."""
    settings: dict[str, Any]
    detector: str
    """Folder of the trained detector."""
    boxes: dict[str, float | None]
    masks: dict[str, float | None]
    classes: Sequence[dict[str, Any]]
    detections: int
    faults: int
    """Problems in annotations and images."""
    faults_file: str | None
    figure: str | None
    model_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the record in results.jsonl."""
        return asdict(self)
