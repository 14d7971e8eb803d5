"""Records of finished runs, one small JSON file each, and the studies that refer to them."""

import json
import logging
import statistics
from pathlib import Path
from typing import Any

from snclr.io.atomic import write_atomic
from snclr.studies.runs import Run
from snclr.train.metrics import with_current_names

SCHEMA = 1
_SERIES = (
    "loss", "neighbor_purity", "queue_knn", "positiveness_entropy", "neighbor_agreement",
    "pulled_share", "spread", "effective_rank", "queue_fill",
)  # fmt: skip
_log = logging.getLogger("snclr")


class Records:
    """A folder of results: `runs/` has a record per run, `studies/` lists the runs of each table.

    Several studies may share a folder; a run that two of them need is trained once.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.runs = self.folder / "runs"
        self.studies = self.folder / "studies"

    def find(self, run: Run) -> dict[str, Any] | None:
        """Read the record of a finished run; None, with a warning, if it is damaged or of other settings."""
        path = self.runs / run.record_name
        record = _read(path)
        if record is None or run.is_recorded_by(record):
            return record
        _log.warning("%s is of a run with other settings; the run is repeated", path)
        return None

    def by_row(self, study: dict[str, Any]) -> list[dict[int, dict[str, Any]]]:
        """Return the finished records of each row of a study by seed."""
        return [
            {int(seed): r for seed, name in row["records"].items() if (r := _read(self.runs / name)) is not None}
            for row in study["rows"]
        ]


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record or study atomically, one field per line so that versions can be compared."""
    fields = (f" {json.dumps(n)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for n, v in record.items())
    write_atomic(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _read(path: Path) -> dict[str, Any] | None:
    """Read a record or study; None if there is none, or, with a warning, if it is damaged or of another schema."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] == SCHEMA:
            return {**record, "series": with_current_names(dict(record.get("series", {})))}
        problem: object = f"it is not of schema {SCHEMA}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error
    _log.warning("cannot read %s (%s); its runs are repeated", path, problem)
    return None


def downsample_metrics(lines: list[dict[str, Any]], points: int = 60) -> dict[str, list[float | None]]:
    """Average the lines of metrics.jsonl over at most `points` windows, by metric.

    >>> downsample_metrics([{"step": s, "epoch": s / 4, "loss": float(s)} for s in (1, 2, 3, 4)], points=2)["loss"]
    [1.5, 3.5]
    """
    count = min(points, len(lines))
    windows = [lines[i * len(lines) // count : (i + 1) * len(lines) // count] for i in range(count)]
    series: dict[str, list[float | None]] = {name: [_round(w[-1][name]) for w in windows] for name in ("step", "epoch")}
    for name in _SERIES:
        values = [[line[name] for line in window if isinstance(line.get(name), (int, float))] for window in windows]
        if any(values):
            series[name] = [_round(statistics.fmean(v)) if v else None for v in values]
    return series


def _round(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.5g}")
