"""Records of finished runs: one small JSON file each, found again by its key. And the studies that name them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from snclr.comparison.plan import Run
from snclr.durable import write_atomic
from snclr.errors import UserError

SCHEMA = 1
_log = logging.getLogger("snclr")


class Records:
    """A folder of results: `runs/` has a record for each run, `studies/` which runs make up which table.

    Several studies may share a folder; a run that two of them need is made once.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.runs = self.folder / "runs"
        self.studies = self.folder / "studies"

    def path(self, run: Run) -> Path:
        """Where the record of a run is."""
        return self.runs / run.record

    def find(self, run: Run) -> dict[str, Any] | None:
        """The record of a finished run, or None. A damaged one counts as none, and is said."""
        record = self._read(self.path(run))
        if record is not None and not run.is_recorded_by(record):
            _log.warning("%s is of a run with other settings; this one is made again", self.path(run))
            return None
        return record

    def by_name(self, name: str) -> dict[str, Any] | None:
        """The record in the file of that name, as studies name them."""
        return self._read(self.runs / name)

    def of_rows(self, study: dict[str, Any]) -> list[dict[int, dict[str, Any]]]:
        """For each row of a study its records by seed, as far as they are finished."""
        return [
            {int(seed): record for seed, name in row["records"].items() if (record := self.by_name(name)) is not None}
            for row in study["rows"]
        ]

    def write(self, record: dict[str, Any], path: Path) -> None:
        """Keep a record, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A field a line: small enough to commit, and a difference between two versions can be read.
        fields = (f" {json.dumps(n)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for n, v in record.items())
        write_atomic(path, "{\n" + ",\n".join(fields) + "\n}\n")

    def write_study(self, study: dict[str, Any]) -> Path:
        """Keep which runs make up a table, under its name."""
        path = self.studies / f"{study['name']}.json"
        self.write(study, path)
        return path

    def read_study(self, name: str) -> dict[str, Any]:
        """The study of that name."""
        path = self.studies / f"{name}.json"
        try:
            study = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            there = ", ".join(sorted(p.stem for p in self.studies.glob("*.json"))) or "none"
            raise UserError(f"there is no study {name!r} in {self.folder}; there are: {there}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); run its command again") from error
        if not isinstance(study, dict) or study.get("schema") != SCHEMA:
            raise UserError(f"{path} is not a study of schema {SCHEMA}; run its command again")
        return study

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be read (%s); the run is made again", path, error)
            return None
        if isinstance(record, dict) and record.get("schema") == SCHEMA:
            return record
        _log.warning("%s is not a record of schema %d; the run is made again", path, SCHEMA)
        return None


def thinned(lines: list[dict[str, Any]], points: int = 60) -> dict[str, list[float | None]]:
    """The course of a run's metrics as means over at most `points` stretches of its lines, by name.

    >>> thinned([{"step": s, "epoch": s / 4, "loss": float(s)} for s in (1, 2, 3, 4)], points=2)["loss"]
    [1.5, 3.5]
    """
    names = ("loss", "same_class", "queue_knn", "positiveness_entropy", "spread", "effective_rank", "queue_fill")
    count = min(points, len(lines))
    parts = [lines[i * len(lines) // count : (i + 1) * len(lines) // count] for i in range(count)]
    found: dict[str, list[float | None]] = {
        "step": [part[-1]["step"] for part in parts],
        "epoch": [_rounded(part[-1]["epoch"]) for part in parts],
    }
    for name in names:
        values = [[line[name] for line in part if isinstance(line.get(name), (int, float))] for part in parts]
        if any(values):
            found[name] = [_rounded(sum(v) / len(v)) if v else None for v in values]
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
