"""Promises 1, 2 and 4: repeated runs are identical, a killed run resumes, and a run directory has one writer."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from snclr.evaluation.results import read_results
from tests.reliability.harness import STEPS, Command, Sandbox, assert_one_interval_lost_at_most, assert_same_result
from tests.reliability.inject import POINTS

OCCURRENCES = (1, 2, 4)
FORCED = [
    (point, nth) for nth in OCCURRENCES for point in POINTS if nth == 1 or not point.startswith("before the settings")
]
"""Every point where a kill is forced, with the occurrence of the point."""


def repeat(sandbox: Sandbox, seed: int) -> None:
    """Run the same command with 0 or 2 dataloader workers: it gives the reference run."""
    out = sandbox.new_path()
    sandbox.pretrain(out, workers=2 * (seed % 2)).expect_exit(0)
    assert_same_result(out, sandbox.reference_run())
    shutil.rmtree(out)


def random_kill(sandbox: Sandbox, seed: int) -> None:
    """Kill the run at a random moment, once or twice (every tenth trial with dataloader workers), and resume it."""
    chance = random.Random(seed)
    reference, out = sandbox.reference_run(), sandbox.new_path()
    workers = 2 if seed % 10 == 9 else 0
    for _ in range(chance.choice((1, 1, 2))):
        step, moment = chance.randrange(1, STEPS), chance.random() * sandbox.seconds

        def start(share: float, step: int = step, moment: float = moment) -> Command:
            run = sandbox.pretrain(out, "--resume", workers=workers)
            if workers:  # they take long to start
                run.wait_for_step(max(1, int(step * share)))
            time.sleep(moment * share * (0.1 if workers else 1))
            return run

        _kill(sandbox, out, start)
        assert_one_interval_lost_at_most(out)
    sandbox.pretrain(out, "--resume", workers=workers).expect_exit(0)
    assert_same_result(out, reference)
    shutil.rmtree(out)


def forced_kill(sandbox: Sandbox, seed: int) -> None:
    """Kill the run at one exact point of a write, a rename or a deletion, and resume it."""
    point, nth = FORCED[seed % len(FORCED)]
    reference, out = sandbox.reference_run(), sandbox.new_path()
    run = sandbox.pretrain(out, "--resume", faults=[{"name": "kill_at", "point": point, "nth": nth}])
    if (code := run.wait()) == 0:  # the point occurred fewer times
        raise AssertionError(f"{point} did not occur {nth} times")
    assert code == -signal.SIGKILL, (point, nth, run.output)
    assert_one_interval_lost_at_most(out)
    sandbox.pretrain(out, "--resume").expect_exit(0)
    assert_same_result(out, reference)
    shutil.rmtree(out)


def evaluation_kill(sandbox: Sandbox, seed: int) -> None:
    """Kill an evaluation (fine-tuning in odd trials) at a random moment; the same command then repeats it."""
    chance = random.Random(seed)
    command = _evaluation(("knn", "finetune")[seed % 2])
    whole, run = sandbox.new_path(), sandbox.new_path()
    shutil.copytree(sandbox.reference_run(), whole)
    shutil.copytree(sandbox.reference_run(), run)
    began = time.monotonic()
    sandbox.snclr(command[0], whole, *command[1:]).expect_exit(0)
    took = time.monotonic() - began
    moment = chance.random() * took

    def start(share: float) -> Command:
        process = sandbox.snclr(command[0], run, *command[1:])
        time.sleep(moment * share)
        return process

    _kill(sandbox, run, start)
    sandbox.snclr(command[0], run, *command[1:]).expect_exit(0)
    last = [read_results(path)[-1] for path in (run, whole)]
    assert last[0]["numbers"] == last[1]["numbers"], last
    assert_same_result(run, whole)
    shutil.rmtree(whole)
    shutil.rmtree(run)


def second_run(sandbox: Sandbox, seed: int) -> None:
    """Refuse a second run in the directory of a running one, and accept it once the first one is killed."""
    reference, out = sandbox.reference_run(), sandbox.new_path()
    workers = 2 if seed % 4 == 3 else 0
    first = sandbox.pretrain(out, workers=workers, faults=[{"name": "slow_steps", "seconds": 0.25}])
    first.wait_for_step(2)
    flag = ("--resume", "--overwrite", "--no-resume")[seed % 3]
    refusal = sandbox.pretrain(out, flag).expect_exit(2)
    assert "in use by a running job" in refusal, refusal
    assert str(first.pid) in refusal, refusal
    assert first.alive(), first.output
    if seed % 2:
        first.send(signal.SIGKILL)  # only the run: its workers must not keep the lock
        assert first.wait() == -signal.SIGKILL, first.output
        sandbox.pretrain(out, "--resume").expect_exit(0)
    else:
        first.expect_exit(0)
    assert_same_result(out, reference)
    shutil.rmtree(out)


def _kill(sandbox: Sandbox, folder: Path, start: Callable[[float], Command]) -> None:
    """Kill a command that writes to `folder`; `start` starts it and waits for a share of its duration.

    If it has ended by then, restore the folder and try again with half the share.
    """
    before, share = sandbox.new_path("before"), 1.0
    if folder.exists():
        shutil.copytree(folder, before)
    while True:
        process = start(share)
        process.send(signal.SIGKILL, group=True)
        if (code := process.wait()) == -signal.SIGKILL:
            break
        assert code == 0, (code, process.output)
        shutil.rmtree(folder)
        if before.exists():
            shutil.copytree(before, folder)
        share /= 2
    shutil.rmtree(before, ignore_errors=True)


def _evaluation(name: str) -> list[str]:
    options = {"knn": ["--k=5"], "finetune": ["--labels=50%", "--epochs=6", "--batch-size=8", "--workers=0"]}
    return [name, *options[name], "--device=cpu"]
