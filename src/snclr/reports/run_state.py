"""Whether a run is complete, in progress or stopped, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import snclr_command
from snclr.io.jsonl import is_finite_number


@dataclass(frozen=True)
class RunState:
    """The state of a run in one or two words, a note, and the command that continues a stopped run."""

    title: str
    note: str = ""
    resume: str | None = None

    @property
    def text(self) -> str:
        """State and note in one line."""
        return f"{self.title} {self.note}".strip() if self.resume else self.title


COMPLETE = RunState("complete", "encoder written")


def read_state(run: RunDir, sessions: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> RunState:
    """Return the state of a run; a run without an encoder is in progress only while a process holds its lock."""
    if run.encoder_weights.is_file():
        return COMPLETE
    ended = bool(sessions) and is_finite_number(sessions[-1].get("seconds"))
    if not ended and run.lock.is_held():
        return RunState("in progress", "no encoder yet")
    step = _last_step(run, records)
    return RunState(
        "stopped", "before the first step" if step is None else f"at step {step:,}",
        snclr_command("pretrain", "--resume", "--out", run.path),
    )  # fmt: skip


def _last_step(run: RunDir, records: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the step of the newest checkpoint, where a resume continues; without one, the last logged step."""
    saved = [int(path.name[5:15]) for path in run.checkpoints.glob("step-" + "[0-9]" * 10)]
    return max(saved) if saved else int(records[-1]["step"]) if records else None
