"""Evaluation results of a run, one JSON line each, in its folder: nothing measured is ever lost or overwritten."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from snclr.durable import explain_full_disk, write_all
from snclr.errors import UserError
from snclr.train.run_folder import RunFolder

_log = logging.getLogger(__name__)


def append_result(
    run_folder: Path | str, kind: str, numbers: Mapping[str, float | int | None], protocol: str, **facts: Any
) -> dict[str, Any]:
    """Add one result ("knn", "linear" …) to the run's results.jsonl, and return it as written.

    `numbers` are what was measured, `protocol` says how; `facts` are further JSON values (step, data …). A number that
    is not finite is written as null.

    >>> import tempfile; run = tempfile.mkdtemp()
    >>> _ = append_result(run, "knn", {"top1": 0.73}, "kNN: k = 200", step=100)
    >>> [(result["kind"], result["numbers"], result["step"]) for result in read_results(run)]
    [('knn', {'top1': 0.73}, 100)]
    """
    path = RunFolder(run_folder).results
    if not path.parent.is_dir():
        raise UserError(f"there is no run folder {path.parent}: give the folder that was the --out of snclr pretrain")
    record = {
        "kind": kind,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numbers": {name: _finite(value) for name, value in numbers.items()},
        "protocol": protocol,
        **facts,
    }
    line = (json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n").encode()
    with explain_full_disk(path, len(line)):
        # O_APPEND and a single write: two evaluations that end at once do not mix their lines.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a kill or a full disk cut the last line short
                line = b"\n" + line
            write_all(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
    return record


def read_results(run_folder: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """All results of a run, or those of one kind, oldest first; [] before the first."""
    path = RunFolder(run_folder).results
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    results = []
    for number, line in enumerate(lines, start=1):
        if record := _parse(line):
            results.append(record)
        elif line.strip():
            _log.warning("line %d of %s is not a result and was passed over: %r", number, path, line[:80])
    return [record for record in results if kind is None or record["kind"] == kind]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    complete = (
        isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("numbers"), dict)
    )
    return record if complete else None


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
