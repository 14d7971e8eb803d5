"""Promise 5: a stop (Ctrl-C, Kubernetes, SLURM) saves the current step and prints the command that continues it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.reliability.fork_server import ENVIRONMENT
from tests.reliability.harness import STEPS, Sandbox, assert_same_result, last_step, newest_checkpoint

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
CASES = list(itertools.product((2, 0), ("group", "process"), CODES))
"""Dataloader workers, target of the signal, and the signal."""
CONSOLE_SCRIPT = [str(Path(sys.executable).with_name("snclr"))]
EARLY = (("pretrain", ["-m", "snclr"], 1200), ("knn", CONSOLE_SCRIPT, 600))
"""A command, how Python starts it, and how many modules it imports at least before it writes files."""
MAX_SECONDS = 25.0
"""Kubernetes and SLURM send SIGKILL after 30 s by default."""


def stop(sandbox: Sandbox, seed: int) -> None:
    """Stop a run by a signal, then continue it with the command that it printed."""
    workers, target, number = CASES[seed % len(CASES)]
    reference, out = sandbox.reference_run(), sandbox.new_path()
    run = sandbox.pretrain(out, workers=workers, faults=[{"name": "slow_steps", "seconds": 0.05}])
    run.wait_for_step(3 + seed % 5)
    before, began = last_step(out), time.monotonic()
    run.send(number, group=target == "group")
    printed = run.expect_exit(CODES[number])
    took = time.monotonic() - began
    assert not sandbox.check_time_limits or took <= MAX_SECONDS, (
        f"{number.name} to the {target}: ended after {took:.0f} s"
    )
    assert f"stopped by {number.name}" in printed, printed
    command = f"snclr pretrain --resume --out {out}"
    assert command in printed, printed
    kept = newest_checkpoint(out)
    assert kept is not None
    assert kept.step == last_step(out), (kept.step, last_step(out))  # the last step, not that of the last interval
    assert before <= kept.step < STEPS, (before, kept.step)
    sandbox.snclr(*command.split()[1:], out=out).expect_exit(0)
    assert_same_result(out, reference)
    shutil.rmtree(out)


def early_interrupt(sandbox: Sandbox, seed: int) -> None:
    """Press Ctrl-C while the modules of a command are imported: it exits with 130, one line and no files."""
    command, start, modules = EARLY[seed % len(EARLY)]
    generator = random.Random(f"{seed} {os.environ.get('SNCLR_TEST_SEED', '')}")
    out, imports = sandbox.new_path("early"), generator.randrange(1, modules)
    place = ["--out", str(out), "--batch-size", "16"] if command == "pretrain" else [str(sandbox.reference_run())]
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *start, command, *place, "--data", str(sandbox.images)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stderr is not None
    errors, seen = [], 0
    for line in process.stderr:
        if not line.startswith("import time:"):
            errors.append(line)
        elif seen or line.endswith(" snclr.runtime.early_interrupt\n"):  # the first module of the package
            seen += 1
            if seen == imports + 1:
                time.sleep(generator.random() / 50)
                process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    status = [f"snclr {command}: {step}\n" for step in ("starting", "loading torch")]
    errors = [line for line in errors if line not in status]
    assert (process.returncode, errors, printed) == (130, ["interrupted\n"], ""), (imports, process.returncode, errors)
    assert not out.exists()
