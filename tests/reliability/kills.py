"""Promises 1, 2 and 4: repeated runs are identical, a killed run resumes, and a run directory has one writer."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from snclr.evaluation.results import read_results
from tests.reliability.harness import STEPS, Command, Workshop, assert_lost_little, assert_same_end
from tests.reliability.inject import POINTS

OCCURRENCES = (1, 2, 4)
FORCED = [
    (point, nth) for nth in OCCURRENCES for point in POINTS if nth == 1 or not point.startswith("before the settings")
]
"""Every point where a kill is forced, with the occurrence of the point."""


def repeat(shop: Workshop, seed: int) -> None:
    """Run the same command with 0 or 2 dataloader workers: it gives the undisturbed run."""
    out = shop.place()
    shop.pretrain(out, workers=2 * (seed % 2)).ends_with(0)
    assert_same_end(out, shop.undisturbed())
    shutil.rmtree(out)


def random_kill(shop: Workshop, seed: int) -> None:
    """Kill the run at a random moment, once or twice (every tenth trial with dataloader workers), and resume it."""
    chance = random.Random(seed)
    undisturbed, out = shop.undisturbed(), shop.place()
    workers = 2 if seed % 10 == 9 else 0
    for _ in range(chance.choice((1, 1, 2))):
        step, moment = chance.randrange(1, STEPS), chance.random() * shop.seconds

        def start(share: float, step: int = step, moment: float = moment) -> Command:
            run = shop.pretrain(out, "--resume", workers=workers)
            if workers:  # they take long to start
                run.reach(max(1, int(step * share)))
            time.sleep(moment * share * (0.1 if workers else 1))
            return run

        _kill(shop, out, start)
        assert_lost_little(out)
    shop.pretrain(out, "--resume", workers=workers).ends_with(0)
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def forced_kill(shop: Workshop, seed: int) -> None:
    """Kill the run at one exact point of a write, a rename or a deletion, and resume it."""
    point, nth = FORCED[seed % len(FORCED)]
    undisturbed, out = shop.undisturbed(), shop.place()
    run = shop.pretrain(out, "--resume", faults=[{"name": "kill_at", "point": point, "nth": nth}])
    if (code := run.wait()) == 0:  # the point occurred fewer times
        raise AssertionError(f"{point} did not occur {nth} times")
    assert code == -signal.SIGKILL, (point, nth, run.output)
    assert_lost_little(out)
    shop.pretrain(out, "--resume").ends_with(0)
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def evaluation_kill(shop: Workshop, seed: int) -> None:
    """Kill an evaluation (fine-tuning in odd trials) at a random moment; the same command then repeats it."""
    chance = random.Random(seed)
    command = _evaluation(("knn", "finetune")[seed % 2])
    whole, run = shop.place(), shop.place()
    shutil.copytree(shop.undisturbed(), whole)
    shutil.copytree(shop.undisturbed(), run)
    began = time.monotonic()
    shop.snclr(command[0], whole, *command[1:]).ends_with(0)
    took = time.monotonic() - began
    moment = chance.random() * took

    def start(share: float) -> Command:
        process = shop.snclr(command[0], run, *command[1:])
        time.sleep(moment * share)
        return process

    _kill(shop, run, start)
    shop.snclr(command[0], run, *command[1:]).ends_with(0)
    last = [read_results(path)[-1] for path in (run, whole)]
    assert last[0]["numbers"] == last[1]["numbers"], last
    assert_same_end(run, whole)
    shutil.rmtree(whole)
    shutil.rmtree(run)


def second_run(shop: Workshop, seed: int) -> None:
    """Refuse a second run in the directory of a running one, and accept it once the first one is killed."""
    undisturbed, out = shop.undisturbed(), shop.place()
    workers = 2 if seed % 4 == 3 else 0
    first = shop.pretrain(out, workers=workers, faults=[{"name": "slow_steps", "seconds": 0.25}])
    first.reach(2)
    flag = ("--resume", "--overwrite", "--no-resume")[seed % 3]
    refusal = shop.pretrain(out, flag).ends_with(2)
    assert "in use by a running job" in refusal, refusal
    assert str(first.pid) in refusal, refusal
    assert first.alive(), first.output
    if seed % 2:
        first.send(signal.SIGKILL)  # only the run: its workers must not keep the lock
        assert first.wait() == -signal.SIGKILL, first.output
        shop.pretrain(out, "--resume").ends_with(0)
    else:
        first.ends_with(0)
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def _kill(shop: Workshop, folder: Path, start: Callable[[float], Command]) -> None:
    """Kill a command that writes to `folder`; `start` starts it and waits for a share of its duration.

    If it has ended by then, restore the folder and try again with half the share.
    """
    before, share = shop.place("before"), 1.0
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
