"""Promise 3 and the parts of promises 1, 4, 5, 6, 11 and 12 about several ranks, with torchrun and gloo on the CPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from snclr.train.metrics import read_metrics
from tests.distributed.launcher import run
from tests.reliability import inject
from tests.reliability.fork_server import ENVIRONMENT, ROOT, shared_fork_server
from tests.reliability.harness import (
    CHECKPOINT_EVERY,
    HANG_SECONDS,
    SETTINGS,
    STEPS,
    Sandbox,
    assert_same_result,
    last_step,
    newest_checkpoint,
    setting_flags,
)

RANKS = 2
STOPS = list(itertools.product(("agent", "group"), (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)))
ORPHAN_SECONDS = 10.0
TIMEOUT_SECONDS = 20
"""A shorter one could expire on a busy machine."""


class Job:
    """A run under torchrun: the agent (`agent.pid`, which also names the process group) and its ranks."""

    def __init__(
        self, sandbox: Sandbox, out: Path, *flags: str, restarts: int = 0, workers: int = 0,
        faults: list[dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.out = out
        self.notes = sandbox.new_path("ranks")
        self.notes.mkdir()
        self.log = self.notes / "output.txt"
        launcher = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
        worker = _rank_command(sandbox, out, self.notes, *flags, workers=workers, faults=faults)
        self.agent = shared_fork_server().start(
            ["-m", "torch.distributed.run", *launcher, *worker],
            python=True, output=str(self.log), cwd=str(ROOT), env=ENVIRONMENT,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def pid(self, rank: int, restart: int = 0) -> int:
        """Return the process id of a rank."""
        return int((self.notes / f"{restart}-{rank}.pid").read_text())

    def codes(self) -> dict[str, str]:
        """Return the exit codes of the ranks that were not killed."""
        return {path.stem: path.read_text() for path in self.notes.glob("*.code")}

    def resumed_steps(self) -> list[int]:
        """Return the steps after which attempts resumed, as printed."""
        return [int(step) for step in re.findall(rf"resuming after step (\d+) of {STEPS}\b", self.output)]

    def steps_before(self, restart: int) -> int:
        """Return the last step of the attempts before that restart."""
        return int((self.notes / f"{restart}-0.step").read_text())

    def wait_for_step(self, step: int) -> None:
        """Wait until that step is in the metrics."""
        deadline = time.monotonic() + HANG_SECONDS
        while last_step(self.out) < step:
            assert self.agent.poll() is None, f"it ended before step {step}:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"step {step} was not reached:\n{self.output[-3000:]}"
            time.sleep(0.01)

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Wait for the agent and return its exit code."""
        try:
            return self.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.output[-3000:]}") from None

    def running_pids(self) -> list[int]:
        """Return the process ids of the ranks that still run."""
        pids = [int(path.read_text()) for path in self.notes.glob("*.pid")]
        return [pid for pid in pids if _alive(pid)]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the ranks and the agent if they still run."""
        for pid in self.running_pids():
            os.kill(pid, signal.SIGKILL)
        self.agent.send_signal(signal.SIGKILL, group=True)
        self.agent.wait(HANG_SECONDS)


def _rank_command(
    sandbox: Sandbox, out: Path, notes: Path, *flags: str, workers: int = 0, faults: list[dict[str, Any]] | None = None
) -> list[str]:
    """Return the arguments of Python for one rank."""
    return [
        str(Path(__file__).parent / "rank_worker.py"), str(notes), str(out), json.dumps(faults or []),
        "pretrain", "--resume", *setting_flags(*flags, data=sandbox.images, out=out, workers=workers),
    ]  # fmt: skip


def reference(sandbox: Sandbox) -> Path:
    """Return an uninterrupted run on two ranks, made once."""
    if "ranks" not in sandbox.cached_runs:
        out = sandbox.new_path("reference-ranks")
        _finish(sandbox, out)
        sandbox.cached_runs["ranks"] = out
    return sandbox.cached_runs["ranks"]


def repeat_ranks(sandbox: Sandbox, seed: int) -> None:
    """Run the same command on two ranks with 0 or 2 dataloader workers each: it gives the reference run."""
    out = sandbox.new_path()
    _finish(sandbox, out, workers=2 * (seed % 2))
    _compare(sandbox, out)


def rank_killed(sandbox: Sandbox, seed: int) -> None:
    """Kill one rank: torchrun restarts all, at most one checkpoint interval is lost, and the result is the same."""
    out = sandbox.new_path()
    with Job(sandbox, out, restarts=3, faults=_slow()) as job:
        step = 1 + random.Random(seed).randrange(STEPS - 3)
        job.wait_for_step(step)
        os.kill(job.pid(seed % RANKS), signal.SIGKILL)
        assert job.wait() == 0, job.output[-3000:]
        attempts = sorted(path.stem for path in job.notes.glob("*-0.pid"))
        assert attempts == ["0-0", "1-0"], f"started {len(attempts)} times:\n{job.output[-3000:]}"
        done, resumed = job.steps_before(1), job.resumed_steps()
        assert step <= done < STEPS, (step, done)
        assert len(resumed) <= 1, resumed
        assert done - sum(resumed) <= CHECKPOINT_EVERY, (done, resumed)  # [] before the first checkpoint
    _compare(sandbox, out)


def agent_killed(sandbox: Sandbox, seed: int) -> None:
    """Kill the torchrun agent: its ranks save and end within 10 s, and --resume continues the run."""
    out = sandbox.new_path()
    with Job(sandbox, out, workers=2 * (seed % 2), faults=_slow()) as job:
        job.wait_for_step(2 + seed % 7)
        before = last_step(out)
        os.kill(job.agent.pid, signal.SIGKILL)
        job.wait()
        deadline = time.monotonic() + (ORPHAN_SECONDS if sandbox.check_time_limits else HANG_SECONDS)
        while left := job.running_pids():
            assert time.monotonic() < deadline, f"ranks still run: {left}\n{job.output[-2000:]}"
            time.sleep(0.05)
        kept = newest_checkpoint(out)
        assert kept is not None, job.output[-3000:]
        assert before <= kept.step == last_step(out) < STEPS, (before, kept.step, last_step(out))
        assert job.codes() == {f"0-{rank}": "143" for rank in range(RANKS)}, (job.codes(), job.output[-3000:])
    _finish_in_soak(sandbox, out)


def stop_ranks(sandbox: Sandbox, seed: int) -> None:
    """Send a signal to the agent or the process group: the last step is saved, and --resume gives the same result."""
    target, number = STOPS[seed % len(STOPS)]
    out = sandbox.new_path()
    with Job(sandbox, out, workers=2 * (seed // len(STOPS) % 2), faults=_slow()) as job:
        job.wait_for_step(3 + seed % 5)
        before, began = last_step(out), time.monotonic()
        (os.killpg if target == "group" else os.kill)(job.agent.pid, number)
        job.wait()
        while job.running_pids():  # an agent that the signal ends does not wait for its ranks
            assert time.monotonic() - began < HANG_SECONDS, job.output[-3000:]
            time.sleep(0.05)
        assert not sandbox.check_time_limits or time.monotonic() - began <= 25, (
            f"ended after {time.monotonic() - began:.0f} s"
        )
        allowed = {"143", "130"} if number == signal.SIGINT else {"143"}
        assert set(job.codes().values()) <= allowed, (job.codes(), job.output[-3000:])
        assert len(job.codes()) == RANKS, (job.codes(), job.output[-3000:])
        kept = newest_checkpoint(out)
        assert kept is not None
        assert before <= kept.step == last_step(out) < STEPS, (before, kept.step, last_step(out))
    _finish(sandbox, out)
    _compare(sandbox, out)


def resized(sandbox: Sandbox, seed: int) -> None:
    """Start on two ranks, kill, resume on one, kill, finish on two: each step has the same images."""
    out = sandbox.new_path()
    with Job(sandbox, out, faults=[{"name": "kill_at", "point": "before rename", "nth": 2}]) as job:
        assert job.wait() != 0
    kept = newest_checkpoint(out)
    assert kept is not None
    assert kept.step == CHECKPOINT_EVERY, kept.step
    alone = sandbox.pretrain(
        out, "--resume", faults=[{"name": "kill_at", "point": "before rename", "nth": 1 + seed % 2}]
    )
    assert alone.wait() == -signal.SIGKILL, alone.output
    assert f"resuming after step {CHECKPOINT_EVERY} of {STEPS}" in alone.output, alone.output
    _finish(sandbox, out)
    ends = [newest_checkpoint(path) for path in (out, sandbox.reference_run())]
    assert ends[0] is not None
    assert ends[1] is not None
    for name, value in ends[1].tensors.items():
        if not value.is_floating_point():  # ids, ages and counters of the queue
            assert ends[0].tensors[name].equal(value), name
    assert ends[0].info["skipped"] == ends[1].info["skipped"]
    losses = [[line["loss"] for line in read_metrics(path)] for path in (out, sandbox.reference_run())]
    assert len(losses[0]) == len(losses[1]) == STEPS
    for here, there in zip(*losses, strict=True):
        assert abs(here - there) <= 1e-3 * abs(there), losses
    shutil.rmtree(out)


def nonfinite(sandbox: Sandbox, seed: int) -> None:
    """Make the loss (even seeds) or the gradient of one rank not finite: all ranks stop before the update.

    nonfinite.json lists the images of that step. Every rank still has the parameters and the queue of the checkpoint
    before it, and the run can be resumed.
    """
    what, rank, step = ("loss", "gradient")[seed % 2], seed // 2 % RANKS, 4 + seed % 5
    value = ("nan", "inf")[seed // 4 % 2]
    out = sandbox.new_path()
    notes = sandbox.new_path("ranks")
    notes.mkdir()
    fault = {"name": "not_finite", "what": what, "step": step, "rank": rank, "value": value, "notes": str(notes)}
    done = run(RANKS, *_rank_command(sandbox, out, notes, "--checkpoint-every=1", faults=[fault]), cwd=ROOT)
    assert done.returncode != 0, done.stderr[-3000:]
    # A gradient is the mean over all ranks, so the error cannot name one.
    where = f" on rank {rank}" if what == "loss" else ""
    assert f"step {step}: the {what} is not finite{where}; nothing was updated" in done.stderr, done.stderr[-3000:]
    images = [json.loads((notes / f"{n}.ids").read_text()) for n in range(RANKS)]
    weights = [(notes / f"{n}.weights").read_text() for n in range(RANKS)]
    named = [rank] if what == "loss" else list(range(RANKS))
    record = json.loads((out / "nonfinite.json").read_text())
    assert record["step"] == step
    assert record["ranks"] == named
    assert math.isfinite(float(record["loss"])) == (what == "gradient"), record
    assert not math.isfinite(float(record["gradient_norm"])), record
    assert record["ids"] == [image for n in named for image in images[n]], (record, images)
    assert len({image for part in images for image in part}) == SETTINGS["batch-size"], images
    kept = newest_checkpoint(out)
    assert kept is not None
    assert kept.step == step == last_step(out), (kept.step, last_step(out))
    assert weights == [inject.weights_digest(kept.tensors)] * RANKS, "a rank has updated its parameters"
    (out / "nonfinite.json").unlink()
    _finish_in_soak(sandbox, out)


def stopped(sandbox: Sandbox, seed: int) -> None:
    """Suspend a rank (SIGSTOP): the job ends within the timeout and names it."""
    rank, out = seed % RANKS, sandbox.new_path()
    with Job(sandbox, out, f"--timeout={TIMEOUT_SECONDS}", faults=_slow()) as job:
        job.wait_for_step(2)
        os.kill(job.pid(rank), signal.SIGSTOP)
        began = time.monotonic()
        other = job.pid(1 - rank)
        while _alive(other):
            assert time.monotonic() - began < HANG_SECONDS, job.output[-3000:]
            time.sleep(0.05)
        assert not sandbox.check_time_limits or time.monotonic() - began < TIMEOUT_SECONDS + 15, (
            "the other rank ended too late"
        )
        if not sandbox.check_time_limits:  # torchrun kills a rank that does not react to SIGTERM only after 30 s
            os.kill(job.pid(rank), signal.SIGKILL)
        assert job.wait() != 0
        assert f"Ranks that do not respond: {rank}." in job.output, job.output[-3000:]
    _finish_in_soak(sandbox, out)


def _slow() -> list[dict[str, Any]]:
    return [{"name": "slow_steps", "seconds": 0.1}]


def _finish(sandbox: Sandbox, out: Path, workers: int = 0) -> None:
    """Run or resume to the end on forked ranks, which is faster than torchrun."""
    notes = sandbox.new_path("ranks")
    notes.mkdir()
    done = run(RANKS, *_rank_command(sandbox, out, notes, workers=workers), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def _finish_in_soak(sandbox: Sandbox, out: Path) -> None:
    """In the soak, resume the run to its end and compare it; in `make test`, `rank_killed` shows the same."""
    if sandbox.check_time_limits:
        _finish(sandbox, out)
        _compare(sandbox, out)


def _compare(sandbox: Sandbox, out: Path) -> None:
    assert_same_result(out, reference(sandbox))
    shutil.rmtree(out)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()
