"""Whether a run is complete, in progress or stopped, how to continue it, and what went wrong in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snclr.checkpoint.format import saved_checkpoints
from snclr.checkpoint.run_dir import RunDir
from snclr.errors import snclr_command
from snclr.io.jsonl import is_finite_number, read_jsonl


@dataclass(frozen=True)
class RunState:
    """The state of a run (complete, in progress or stopped), a note, and the command that continues a stopped run."""

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
    saved = saved_checkpoints(run.checkpoints)  # a resume continues at the newest one
    step = max(saved) if saved else int(records[-1]["step"]) if records else None
    return RunState(
        "stopped", "before the first step" if step is None else f"at step {step:,}",
        snclr_command("pretrain", "--resume", "--out", run.path),
    )  # fmt: skip


def read_alerts(run: RunDir, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe collapsed features and the step at which a value was not finite, if there are any."""
    alerts = []
    if collapsed := [record["step"] for record in records if record.get("collapsed") is True]:
        alerts.append(
            f"The features collapsed (spread below 0.1 or effective rank below 2). Logged steps: {len(collapsed):,}, "
            f"first at step {collapsed[0]:,}, last at step {collapsed[-1]:,}."
        )
    if run.nonfinite.is_file():
        stop = next(iter(read_jsonl(run.nonfinite)), {})
        alerts.append(
            f"Training stopped at step {stop.get('step', '?')}: loss {stop.get('loss', '?')}, gradient norm "
            f"{stop.get('gradient_norm', '?')}. {run.nonfinite.name} lists the images of that step."
        )
    return alerts
