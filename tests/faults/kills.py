"""Promises 1, 2 and 4: the same run every time; kill -9 at any moment; never two runs in one folder."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from snclr.evaluate.results import read_results
from tests.faults.harness import STEPS, Command, Workshop, assert_lost_little, assert_same_end
from tests.faults.inject import POINTS

NTHS = (1, 2, 4)
FORCED = [(point, nth) for nth in NTHS for point in POINTS if nth == 1 or not point.startswith("before the settings")]
"""Every point where a kill is forced: the first time a run gets there, and later ones."""


def repeat(shop: Workshop, seed: int) -> None:
    """The same command with 0 or 2 loader workers gives the undisturbed run."""
    out = shop.place()
    shop.pretrain(out, workers=2 * (seed % 2)).ends_with(0)
    assert_same_end(out, shop.undisturbed())
    shutil.rmtree(out)


def random_kill(shop: Workshop, seed: int) -> None:
    """Kill the run at a random moment, once or twice (every tenth trial with loader workers), and resume it."""
    chance = random.Random(seed)
    undisturbed, out = shop.undisturbed(), shop.place()
    workers = 2 if seed % 10 == 9 else 0
    for _ in range(chance.choice((1, 1, 2))):
        step, moment = chance.randrange(1, STEPS), chance.random() * shop.seconds

        def start(share: float, step: int = step, moment: float = moment) -> Command:
            run = shop.pretrain(out, "--resume", workers=workers)
            if workers:  # which take long to start
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
    if (code := run.wait()) == 0:  # a point that is passed fewer times: the last time must count then
        raise AssertionError(f"{point} was not passed {nth} times")
    assert code == -signal.SIGKILL, (point, nth, run.output)
    assert_lost_little(out)
    shop.pretrain(out, "--resume").ends_with(0)
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def evaluation_kill(shop: Workshop, seed: int) -> None:
    """Kill an evaluation (fine-tuning in odd trials) at a random moment; the same command then gives the same."""
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
        victim = shop.snclr(command[0], run, *command[1:])
        time.sleep(moment * share)
        return victim

    _kill(shop, run, start)
    shop.snclr(command[0], run, *command[1:]).ends_with(0)
    last = [read_results(path)[-1] for path in (run, whole)]
    assert last[0]["numbers"] == last[1]["numbers"], last
    assert_same_end(run, whole)
    shutil.rmtree(whole)
    shutil.rmtree(run)


def second_run(shop: Workshop, seed: int) -> None:
    """A second run on a live folder is refused, leaves it as it is, and is let in once the first one is killed."""
    undisturbed, out = shop.undisturbed(), shop.place()
    workers = 2 if seed % 4 == 3 else 0
    first = shop.pretrain(out, workers=workers, faults=[{"name": "slow_steps", "seconds": 0.25}])
    first.reach(2)
    flag = ("--resume", "--overwrite", "--no-resume")[seed % 3]
    refusal = shop.pretrain(out, flag).ends_with(2)
    assert "in use by a run that is still alive" in refusal, refusal
    assert str(first.pid) in refusal, refusal
    assert first.alive(), first.output
    if seed % 2:
        first.send(signal.SIGKILL)  # the run alone: its workers, if any, must not keep the folder locked
        assert first.wait() == -signal.SIGKILL, first.output
        shop.pretrain(out, "--resume").ends_with(0)
    else:
        first.ends_with(0)
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def _kill(shop: Workshop, folder: Path, start: Callable[[float], Command]) -> None:
    """Kill a command that works in the folder; `start` starts it and waits for that share of its time.

    One that had ended by then was not killed and would prove nothing: what it changed in the folder is undone, and it
    is tried again with half the time.
    """
    before, share = shop.place("before"), 1.0
    if folder.exists():
        shutil.copytree(folder, before)
    while True:
        victim = start(share)
        victim.send(signal.SIGKILL, group=True)
        if (code := victim.wait()) == -signal.SIGKILL:
            break
        assert code == 0, (code, victim.output)
        shutil.rmtree(folder)
        if before.exists():
            shutil.copytree(before, folder)
        share /= 2
    shutil.rmtree(before, ignore_errors=True)


def _evaluation(name: str) -> list[str]:
    options = {"knn": ["--k=5"], "finetune": ["--labels=50%", "--epochs=6", "--batch-size=8", "--workers=0"]}
    return [name, *options[name], "--device=cpu"]
