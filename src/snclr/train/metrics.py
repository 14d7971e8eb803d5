"""The numbers of a run: one JSON object a line in metrics.jsonl, and the same as TensorBoard events.

After a resume the file is what an undisturbed run would have written, apart from `timing`, where clock readings go.
For that, a step's numbers are written before its checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from snclr.durable import explain_full_disk, write_all, write_atomic
from snclr.errors import UserError
from snclr.train.run_folder import RunFolder

RESERVED = ("step", "epoch", "timing", "nonfinite")
_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to a run's metrics. `resume_step` None starts anew; a number keeps what was written up to that step.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> with MetricsLog(folder, resume_step=None, tensorboard=False) as log:
    ...     log.write(1, 0, {"loss": 2.5}, timing={"images_per_second": 100.0})
    >>> read_metrics(folder)
    [{'step': 1, 'epoch': 0, 'loss': 2.5, 'timing': {'images_per_second': 100.0}}]
    """

    def __init__(self, folder: Path | str, *, resume_step: int | None, tensorboard: bool = True) -> None:
        run = RunFolder(folder)
        run.path.mkdir(parents=True, exist_ok=True)
        self._path = run.metrics
        _drop_after(self._path, resume_step)
        self._fd: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._events = (
            _Events(run.tensorboard, first_step=0 if resume_step is None else resume_step + 1) if tensorboard else None
        )

    def write(
        self, step: int, epoch: float, values: Mapping[str, Any], *, timing: Mapping[str, Any] | None = None
    ) -> None:
        """One line. Values are numbers (0-d tensors too), text, None, or lists of these; `timing` is what clocks said.

        A value that is not finite is written as null, and its name with "nan", "inf" or "-inf" under "nonfinite".
        """
        assert self._fd is not None, "closed"
        if taken := [name for name in RESERVED if name in values]:
            raise ValueError(f"{taken} cannot be names of metrics; they are fields of every line")
        nonfinite: dict[str, str] = {}
        fields = {name: _plain(value, name, nonfinite) for name, value in values.items()}
        record: dict[str, Any] = {"step": int(step), "epoch": _plain(epoch, "epoch", nonfinite), **fields}
        if nonfinite:
            record["nonfinite"] = nonfinite
        clocks = {name: _plain(value, name, {}) for name, value in (timing or {}).items()}
        if clocks:
            record["timing"] = clocks
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with explain_full_disk(self._path, len(line)):
            self._append(line)
            if self._events is not None:
                self._events.write(step, {**fields, **{f"timing/{name}": value for name, value in clocks.items()}})

    def sync(self) -> None:
        """Force the lines to disk; called before a checkpoint, so that no power cut loses lines it presupposes."""
        assert self._fd is not None, "closed"
        with explain_full_disk(self._path, 0):
            os.fsync(self._fd)

    def close(self) -> None:
        """Finish both files; harmless a second time."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, line)
        except OSError:
            # Half a line would spoil the next one, should the caller go on.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """All lines of a run, oldest first; a last line cut short by a kill is left out; [] before the first."""
    path = RunFolder(folder).metrics
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = [_parse(line) for line in lines]
    for number, (line, record) in enumerate(zip(lines, records, strict=True), start=1):
        if record is None and line.strip() and number < len(lines):
            raise UserError(
                f"line {number} of {path} is not a metrics record: {line[:80]!r}. Restore or delete that line"
            )
    return [record for record in records if record is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _drop_after(path: Path, resume_step: int | None) -> None:
    """Keep the records up to `resume_step` (none for None), in one step: a kill leaves the old file or the new."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    kept = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None and resume_step is not None and record["step"] <= resume_step:
            kept.append(line + b"\n")
        elif record is None and line.strip() and number < len(lines):
            _log.warning("line %d of %s is not a metrics record and was dropped: %r", number, path, line[:80])
    if (wanted := b"".join(kept)) != content:
        write_atomic(path, wanted)


def _plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """What JSON can hold of `value`; numbers that are not finite are noted in `nonfinite` under `name`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite[name] = str(float(value))
        return None
    if isinstance(value, (list, tuple)):
        return [_plain(item, name, nonfinite) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item(), name, nonfinite)
    raise TypeError(
        f"the metric {name!r} is a {type(value).__name__}; numbers, text, None and lists of them can be logged"
    )


class _Events:
    """TensorBoard scalars, written at once by the caller.

    Not SummaryWriter: its thread dies on a full disk, after which the training loop waits on its queue for ever, and a
    thread does not go well with forked data workers.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        # A name of its own even for two starts within a second, sorting after the earlier one.
        self._writer: Any = EventsWriter(str(folder.absolute() / "events"), f".{time.time_ns()}")
        # Tells TensorBoard to hide what an earlier start of this run wrote from this step on.
        start = Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._writer.write_event(start)
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.write_event(
                    Event(wall_time=time.time(), step=int(step), summary=scalar(name, float(value)))
                )
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            # Each write was flushed and would have said so; what fails here is a repetition of that.
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
