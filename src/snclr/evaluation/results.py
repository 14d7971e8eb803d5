"""The typed results of kNN, few-shot, linear and fine-tuning, and the results.jsonl of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError
from snclr.io.jsonl import append_jsonl, read_jsonl

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Baseline:
    """Accuracy of other features on the same images, with the same classifier."""

    top1: float
    top5: float | None
    standard_error: float
    note: str | None = None
    """How it differs from the run."""


@dataclass(frozen=True)
class AccuracyResult:
    """One accuracy measurement as recorded in results.jsonl; accuracies are in [0, 1]."""

    kind: str
    time: str
    """When the result was recorded (ISO 8601, UTC)."""
    top1: float
    top5: float | None
    """None with five classes or fewer."""
    n: int
    """Labeled test images."""
    standard_error: float
    """Binomial standard error of `top1`."""
    classes: int
    """Classes of the test images."""
    chance: float
    """Share of the largest class of the test images: the accuracy of always predicting it. At least 1/classes."""
    baselines: dict[str, Baseline]
    """Accuracies of the untrained encoder and of raw pixels; empty if they were not computed."""
    warnings: list[str]
    protocol: str
    skipped: int | Sequence[dict[str, Any]]
    """Images that could not be read, or their number."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Build the result from a record in results.jsonl."""
        values = {**record, **record["numbers"]}
        values["baselines"] = {name: Baseline(**baseline) for name, baseline in record["baselines"].items()}
        del values["numbers"]
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the record in results.jsonl."""
        values = asdict(self)
        numbers = {name: values.pop(name) for name in ("top1", "top5")}
        return {"kind": values.pop("kind"), "time": values.pop("time"), "numbers": numbers, **values}


@dataclass(frozen=True)
class KnnResult(AccuracyResult):
    """Accuracy of a weighted k-nearest-neighbor classifier."""

    k: int
    """Neighbors that voted."""
    skipped: int
    """Images that could not be read."""


@dataclass(frozen=True)
class FewShotResult(AccuracyResult):
    """Accuracy of the nearest labeled image, with a few labels per class: the mean over draws of the labeled images.

    `standard_error` is that over the draws.
    """

    labels_per_class: int
    draws: int
    by_draw: list[float]
    """Top-1 accuracy of each draw."""
    skipped: int
    """Images that could not be read."""


@dataclass(frozen=True)
class LinearResult(AccuracyResult):
    """Accuracy of a linear classifier on the frozen encoder."""

    learning_rate: float
    skipped: int
    """Images that could not be read."""


@dataclass(frozen=True)
class FinetuneResult(AccuracyResult):
    """Accuracy of the encoder fine-tuned on a subset of the labels."""

    settings: dict[str, Any]
    labels: str
    """The share or the list file that was given."""
    list: str
    """File in the run directory with the names of the labeled images."""
    list_sha256: str
    model_sha256: str
    skipped: Sequence[dict[str, Any]]
    """Images that could not be read, with the reasons."""


def append_result(
    run: Path | str, kind: str, numbers: Mapping[str, float | int | None], protocol: str, **facts: Any
) -> dict[str, Any]:
    """Append one result ("knn", "linear" …) to the run's results.jsonl and return the record.

    `protocol` states how the numbers were measured; `facts` are further JSON values. A number that is not finite is
    written as null.

    >>> import tempfile; run = tempfile.mkdtemp()
    >>> _ = append_result(run, "knn", {"top1": 0.73}, "kNN: k = 200", step=100)
    >>> [(result["kind"], result["numbers"], result["step"]) for result in read_results(run)]
    [('knn', {'top1': 0.73}, 100)]
    """
    path = RunDir(run).results
    if not path.parent.is_dir():
        raise UserError(f"there is no run directory {path.parent}: give the --out of snclr pretrain")
    record = {
        "kind": kind,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numbers": {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()},
        "protocol": protocol,
        **facts,
    }
    append_jsonl(path, record)
    return record


def read_results(run: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """Return all results of a run, or those of one kind, oldest first."""
    results = read_jsonl(RunDir(run).results, fields={"kind": str, "numbers": dict}, on_invalid="warn")
    return [record for record in results if kind is None or record["kind"] == kind]
