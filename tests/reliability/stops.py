"""Promise 5: a stop (Ctrl-C, Kubernetes, SLURM) saves within a step, says how to go on, and changes nothing."""

from __future__ import annotations

import itertools
import shutil
import signal
import time

from tests.reliability.harness import STEPS, Sandbox, assert_same_result, last_step, newest_checkpoint

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
CASES = list(itertools.product((2, 0), ("group", "process"), CODES))
"""Loader workers, to whom the signal is sent, and the signal."""
MAX_SECONDS = 25.0
"""What Kubernetes and SLURM leave at least (30 s by default), with a margin."""


def stop(sandbox: Sandbox, seed: int) -> None:
    """Stop a run by a signal in the middle, then go on by the very command it printed."""
    workers, whom, number = CASES[seed % len(CASES)]
    reference, out = sandbox.reference_run(), sandbox.new_path()
    run = sandbox.pretrain(out, workers=workers, faults=[{"name": "slow_steps", "seconds": 0.05}])
    run.wait_for_step(3 + seed % 5)
    before, began = last_step(out), time.monotonic()
    run.send(number, group=whom == "group")
    said = run.expect_exit(CODES[number])
    took = time.monotonic() - began
    assert not sandbox.check_time_limits or took <= MAX_SECONDS, f"{number.name} to the {whom}: {took:.0f} s to the end"
    assert f"stopped by {number.name}" in said, said
    command = f"snclr pretrain --resume --out {out}"
    assert command in said, said
    kept = newest_checkpoint(out)
    assert kept is not None
    assert kept.step == last_step(out), (kept.step, last_step(out))  # the step it stopped at, not the last interval
    assert before <= kept.step < STEPS, (before, kept.step)
    sandbox.snclr(*command.split()[1:], out=out).expect_exit(0)
    assert_same_result(out, reference)
    shutil.rmtree(out)
