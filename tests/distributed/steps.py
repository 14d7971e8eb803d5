"""The same training steps on 1, 2 or 4 processes, and how far apart what they did is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.launcher import run
from tests.reliability.harness import Sandbox

WORKER = str(Path(__file__).parent / "step_worker.py")
Played = dict[str, Any]


def play(folder: Path, processes: int, *names: str, timeout: float = 600) -> dict[str, Played]:
    """What steps of these names (see `step_worker.py`) did on so many processes."""
    out = folder / f"{processes}.pt"
    done = run(processes, WORKER, str(out), *names, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    played: dict[str, Played] = torch.load(out, weights_only=True)
    out.unlink()  # hundreds of megabytes
    return played


def largest_difference(one: Played, other: Played) -> float:
    """Over every entry of every gradient of the first step."""
    first, second = one["gradients"][0], other["gradients"][0]
    assert first.keys() == second.keys()
    assert len(first) > 10
    return max(float((first[key].double() - second[key].double()).abs().max()) for key in first)


def assert_same_weights(one: Played, other: Played, tolerance: float) -> None:
    """Every weight, buffer and queued feature after the last step, and the loss of every step on the way there."""
    early, late = (sum(one["losses"][part]) for part in (slice(10, 30), slice(-20, None)))  # the queue is full by 10
    assert late < early, "the steps must have moved the weights for this to say anything"
    for step, (mine, its) in enumerate(zip(one["losses"], other["losses"], strict=True)):
        assert abs(mine - its) <= tolerance, f"loss of step {step}"
    assert one["state"].keys() == other["state"].keys()
    for key, value in one["state"].items():
        if value.is_floating_point():
            limit = tolerance * max(1.0, float(value.abs().max()))
            assert float((other["state"][key] - value).abs().max()) <= limit, key
        else:
            assert torch.equal(other["state"][key], value), key


def two_hundred_steps(sandbox: Sandbox, seed: int) -> None:
    """Promise 6: 200 steps of a ResNet in double precision on 2 processes (even seeds) or 4, and on one."""
    name = "64:200:sgd:resnet10-tiny:16:16"
    folder = sandbox.new_path("steps")
    folder.mkdir()
    one, several = (play(folder, processes, name, timeout=1200)[name] for processes in (1, (2, 4)[seed % 2]))
    assert_same_weights(one, several, 1e-8)
