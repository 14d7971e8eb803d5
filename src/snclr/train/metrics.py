"""The metrics of a run: one JSON object per line in metrics.jsonl, and the same values as TensorBoard events.

After a resume the file is what an uninterrupted run would have written, except for the timings under
`timing`. For that, the metrics of a step are written before its checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.checkpoint.run_dir import RunDir
from snclr.io.atomic import explain_full_disk, write_atomic
from snclr.io.jsonl import append_or_undo, read_jsonl

if TYPE_CHECKING:
    from snclr.data.decode import RGBImage

_FIELDS = {"step": int}
RENAMED_METRICS = {"same_class": "neighbor_purity"}
"""Metrics that had another name in earlier versions: that name and the present one."""


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Append to a run's metrics. With `resume_step`, keep what was written up to that step; with None, start anew.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> with MetricsLog(folder, resume_step=None) as log:
    ...     log.write(1, 0, {"loss": 2.5}, timing={"images_per_second": 100.0})
    >>> read_metrics(folder)
    [{'step': 1, 'epoch': 0, 'loss': 2.5, 'timing': {'images_per_second': 100.0}}]
    """

    def __init__(self, folder: Path | str, *, resume_step: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        run = RunDir(folder)
        run.path.mkdir(parents=True, exist_ok=True)
        self._path = run.metrics
        _drop_after(self._path, resume_step)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        run.tensorboard.mkdir(parents=True, exist_ok=True)
        # TensorBoard's own format. SummaryWriter is not used: its thread dies on a full disk, after which the training
        # loop waits on its queue forever, and a thread is unsafe with forked data workers.
        # A unique name that sorts after earlier ones, even for two starts within a second.
        self._events: Any = EventsWriter(str(run.tensorboard.absolute() / "events"), f".{time.time_ns()}")
        # TensorBoard then hides what an earlier start of this run wrote from this step on.
        first_step = 0 if resume_step is None else resume_step + 1
        self._add_event(first_step, session_log=SessionLog(status=SessionLog.START))
        self._events.flush()

    def write(
        self, step: int, epoch: float, values: Mapping[str, Any], *, timing: Mapping[str, Any] | None = None
    ) -> None:
        """Append one line. Values are numbers (also 0-d tensors), text or None; `timing` has the timings.

        A value that is not finite is written as null, and its name with "nan", "inf" or "-inf" under "nonfinite".
        """
        from tensorboardX.summary import scalar

        nonfinite: dict[str, str] = {}
        fields = {name: _plain(value, name, nonfinite) for name, value in values.items()}
        record: dict[str, Any] = {"step": int(step), "epoch": _plain(epoch, "epoch", nonfinite), **fields}
        if nonfinite:
            record["nonfinite"] = nonfinite
        timings = {name: _plain(value, name, {}) for name, value in (timing or {}).items()}
        if timings:
            record["timing"] = timings
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with explain_full_disk(self._path, len(line)):
            append_or_undo(self._file.fileno(), line)
            for name, value in (fields | {f"timing/{name}": value for name, value in timings.items()}).items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._add_event(step, summary=scalar(name, float(value)))
            self._events.flush()

    def write_image(self, step: int, name: str, pixels: RGBImage) -> None:
        """Add an image (height, width, 3) to the TensorBoard events."""
        from tensorboardX.summary import image

        with explain_full_disk(self._path, pixels.nbytes):
            self._add_event(step, summary=image(name, pixels, dataformats="HWC"))
            self._events.flush()

    def _add_event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=time.time(), step=int(step), **content))

    def sync(self) -> None:
        """Force the lines to disk; called before a checkpoint, so that a power cut loses no line it depends on."""
        with explain_full_disk(self._path, 0):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close both files; a second call has no effect."""
        self._file.close()
        with contextlib.suppress(OSError, ValueError):  # an error would repeat that of the last write, or it is closed
            self._events.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Return all records of a run, oldest first; [] if there are none. An incomplete last line is ignored."""
    records = read_jsonl(RunDir(folder).metrics, fields=_FIELDS, on_invalid="raise")
    return [with_current_names(record) for record in records]


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an earlier version under their present names.

    >>> with_current_names({"step": 3, "same_class": 0.5})
    {'step': 3, 'neighbor_purity': 0.5}
    """
    return {RENAMED_METRICS.get(name, name): value for name, value in values.items()}


def _drop_after(path: Path, resume_step: int | None) -> None:
    """Keep the records up to `resume_step` (none for None), atomically, and drop invalid lines with a warning.

    A resumed run of an earlier version then has each metric under one name.
    """
    if not path.exists():
        return
    records = [] if resume_step is None else read_jsonl(path, fields=_FIELDS, on_invalid="warn")
    kept_records = [with_current_names(record) for record in records if record["step"] <= (resume_step or 0)]
    kept = "".join(json.dumps(record) + "\n" for record in kept_records).encode()
    if kept != path.read_bytes():
        write_atomic(path, kept)


def _plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """Convert a tensor or a NumPy scalar; a number that is not finite becomes None and is recorded in `nonfinite`."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[name] = str(value)
        return None
    return value
