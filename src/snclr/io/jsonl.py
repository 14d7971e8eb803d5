"""JSON Lines files: one JSON object per line, appended by a process that may be killed at any time."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from snclr.errors import UserError
from snclr.io.atomic import explain_full_disk, write_all

_log = logging.getLogger(__name__)


def parse_record(line: bytes, fields: Mapping[str, type] | None = None) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if it is not one or a field does not have exactly the given type.

    >>> parse_record(b'{"step": 3}', {"step": int}), parse_record(b'{"step": true}', {"step": int}), parse_record(b"{")
    ({'step': 3}, None, None)
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in (fields or {}).items()):
        return None
    return record


def read_jsonl(
    path: Path, *, fields: Mapping[str, type] | None = None, on_invalid: Literal["skip", "warn", "raise"] = "skip"
) -> list[dict[str, Any]]:
    """Return the records of a file in order; [] if the file does not exist.

    `on_invalid` applies to lines that are not a record with these fields and types. "raise" accepts an incomplete last
    line, which a killed writer leaves behind.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        record = parse_record(line, fields)
        if record is not None:
            records.append(record)
        elif not line.strip() or (on_invalid == "raise" and number == len(lines)):
            continue
        elif on_invalid == "raise":
            raise UserError(f"line {number} of {path} is not a valid record: {line[:80]!r}. Restore or delete it.")
        elif on_invalid == "warn":
            _log.warning("line %d of %s is not a valid record and was skipped: %r", number, path, line[:80])
    return records


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record in a single write and sync it to disk, so that parallel writers do not mix their lines."""
    line = (json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n").encode()
    with explain_full_disk(path, len(line)), open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a killed writer left an incomplete line
            line = b"\n" + line
        append_or_undo(file.fileno(), line)
        os.fsync(file.fileno())


def append_or_undo(fd: int, line: bytes) -> None:
    """Append to an open file; if the disk is full, remove the part of the line that was written."""
    size = os.fstat(fd).st_size
    try:
        write_all(fd, line)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def is_finite_number(value: object) -> bool:
    """Whether a JSON value is a number that fits a float; JSON integers may have thousands of digits.

    >>> is_finite_number(3), is_finite_number(True), is_finite_number(10**400), is_finite_number(float("nan"))
    (True, False, False, False)
    """
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
