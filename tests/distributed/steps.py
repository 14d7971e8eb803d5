"""Run the same training steps on 1, 2 or 4 ranks and compare the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.launcher import run
from tests.reliability.harness import Sandbox

WORKER = str(Path(__file__).parent / "step_worker.py")
StepResults = dict[str, Any]
"""What `step_worker.run_steps` returns."""


def run_cases(folder: Path, ranks: int, *cases: str, timeout: float = 600) -> dict[str, StepResults]:
    """Return the results of each case (see `step_worker.py`) on this number of ranks."""
    out = folder / f"{ranks}.pt"
    done = run(ranks, WORKER, str(out), *cases, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, StepResults] = torch.load(out, weights_only=True)
    out.unlink()  # hundreds of megabytes
    return results


def largest_difference(one: StepResults, other: StepResults) -> float:
    """Return the largest absolute difference of any gradient entry of the first step."""
    first, second = one["gradients"][0], other["gradients"][0]
    assert first.keys() == second.keys()
    assert len(first) > 10
    return max(float((first[key].double() - second[key].double()).abs().max()) for key in first)


def assert_same_weights(one: StepResults, other: StepResults, tolerance: float) -> None:
    """Check the loss of every step, and every weight, buffer and queued feature after the last one."""
    early, late = (sum(one["losses"][part]) for part in (slice(10, 30), slice(-20, None)))  # the queue is full by 10
    assert late < early, "the loss must fall: unchanged weights would be equal too"
    for step, (first, second) in enumerate(zip(one["losses"], other["losses"], strict=True)):
        assert abs(first - second) <= tolerance, f"loss of step {step}"
    assert one["state"].keys() == other["state"].keys()
    for key, value in one["state"].items():
        if value.is_floating_point():
            limit = tolerance * max(1.0, float(value.abs().max()))
            assert float((other["state"][key] - value).abs().max()) <= limit, key
        else:
            assert torch.equal(other["state"][key], value), key


def two_hundred_steps(sandbox: Sandbox, seed: int) -> None:
    """Promise 6: compare 200 steps of a ResNet in double precision on 2 (even seeds) or 4 ranks with one rank."""
    case = "64:200:sgd:resnet10-tiny:16:16"
    folder = sandbox.new_path("steps")
    folder.mkdir()
    one, several = (run_cases(folder, ranks, case, timeout=1200)[case] for ranks in (1, (2, 4)[seed % 2]))
    assert_same_weights(one, several, 1e-8)
