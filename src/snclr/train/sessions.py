"""The sessions of a run in sessions.jsonl: time, command, machine and duration of each start of its training."""

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError
from snclr.io.jsonl import append_jsonl, is_finite_number, read_jsonl
from snclr.runtime.machine import command_line, cpu_name, versions


@contextlib.contextmanager
def record_session(run: RunDir, device: torch.device, ranks: int) -> Iterator[None]:
    """Append a line when the block starts, and one with its seconds when it ends, also after a stop or an error."""
    cuda = device.type == "cuda"
    start = {
        "event": "start", "time": _now(), "command": command_line(),
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(), "ranks": ranks,
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip
    append_jsonl(run.sessions, start)
    began = time.monotonic()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, UserError):  # a missing time must not fail the run, e.g. on a full disk
            append_jsonl(run.sessions, {"event": "end", "time": _now(), "seconds": time.monotonic() - began})


def read_sessions(run: Path | str) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first, each with its "seconds": None if it was killed or is running."""
    sessions: list[dict[str, Any]] = []
    for record in read_jsonl(RunDir(run).sessions, fields={"event": str, "time": str}):
        if record["event"] == "start":
            sessions.append({**record, "seconds": None})
        elif sessions and is_finite_number(record.get("seconds")):
            sessions[-1]["seconds"] = record["seconds"]
    return sessions


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
