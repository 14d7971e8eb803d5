"""Every method: steps on the device in each precision against the CPU in float64, overflow, waits of the host."""

import contextlib
import functools
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snclr.data.loader import Batch
from snclr.diagnostics.setup import CheckRow, Setup, exact_float32, open_task, tiny_batches, tiny_config
from snclr.errors import UserError
from snclr.methods.config import METHODS
from snclr.runtime.device import limit_threads
from snclr.train.pretrain_task import PretrainTask

LIMITS = {"64": 1e-6, "32": 0.05, "bf16": 0.7, "16": 0.5}
"""Largest relative difference of the weights' change after three steps from that of the CPU in float64.

On a CPU, half precision emulated, the largest of all methods is 0.01 in float32, 0.46 in bf16 and 0.22 in fp16: most
methods stay below 2e-5 in float32, but rounding can switch a ReLU near zero or select other neighbors. A change in a
random direction differs by 1.4.
"""
WRONG_VALUES = (
    "A kernel, driver or library computes wrong values: update the driver and torch, and test the memory of the device."
)
NAMES = {"64": "float64", "32": "float32", "bf16": "bf16", "16": "fp16"}
START_SCALE = 16.0
"""Loss scale of the comparison in fp16: the usual first one overflows by design, and the step is skipped."""
OVERFLOWING_SCALE = 2.0**127
"""Loss scale with which every gradient overflows."""
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    "snclr, ViT": {"method": "snclr", "encoder": "test_vit", "stem": "auto"},
}
"""Settings of the tiny runs that are compared, by the name in the row."""
MOST_WAITS = 4
"""Most waits (synchronizations) in a step; each drains the GPU's queue of kernels. tests/device/host_waits.json has the
exact number of every method."""


def check_methods(setup: Setup) -> Iterator[CheckRow]:
    """Compare the change of the weights by three steps of each method with that of the CPU in float64."""
    for precision, limit in LIMITS.items():
        if (reason := unavailable(setup.kind, precision)) is not None:
            yield CheckRow(f"all in {NAMES[precision]}", "not applicable", reason)
            continue
        for name, settings in CASES.items():
            options = {**settings, "precision": precision, "device": setup.device, "out": str(setup.folder / "methods")}
            task, expected = open_task(tiny_config(**options)), reference(name)
            try:
                error = difference(train_steps(task), expected)
            except UserError:  # a loss that is not finite
                error = float("inf")
            yield CheckRow.at_most(f"{name} in {NAMES[precision]}", error, limit, advice=WRONG_VALUES)


def unavailable(kind: str, precision: str) -> str | None:
    """Return why a precision cannot be checked on a device type, or None."""
    if kind == "cpu":
        reasons = {"64": "the CPU in float64 is the reference", "32": None}
        return reasons.get(precision, "half precision needs a GPU")
    return "Apple GPUs have no float64" if kind == "mps" and precision == "64" else None


@functools.cache
def reference(name: str) -> Tensor:
    """Train the steps of a case on the CPU in float64."""
    return train_steps(open_task(tiny_config(**CASES[name], precision="64", device="cpu")))


def train_steps(task: PretrainTask) -> Tensor:
    """Return the change of the weights (P,) by the first steps of a tiny run; UserError if a loss is not finite."""
    if (scaler := task.fabric.strategy.precision.state_dict()) != {}:
        task.fabric.strategy.precision.load_state_dict({**scaler, "scale": START_SCALE})
    before = trained_weights(task)
    with exact_float32(task.fabric.device), limit_threads(1):  # more threads slow down such a small network
        for batch in tiny_batches(task.config.method, task.config.image_size):
            task.training_step(task.fabric.to_device(batch))
    return trained_weights(task) - before


def trained_weights(task: PretrainTask) -> Tensor:
    """Return the trained weights as one vector, float64 on the CPU."""
    return torch.cat([p.detach().cpu().double().flatten() for p in task.module.parameters() if p.requires_grad])


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two changes of the weights, relative to the expected one."""
    return float((found - expected).norm() / expected.norm())


def check_overflow(setup: Setup) -> Iterator[CheckRow]:
    """Force values that are not finite: a step must change no weights, with an error or by skipping."""
    advice = "Do not train on this machine: a step with values that are not finite would ruin the weights."
    task = open_task(tiny_config(device=setup.device, out=str(setup.folder / "overflow")))
    batches = [task.fabric.to_device(batch) for batch in tiny_batches("snclr", task.config.image_size)[:2]]
    task.training_step(batches[0])
    stopped, unchanged = step_with_overflow(task, batches[1])
    text = f"{'stopped' if stopped else 'not stopped'}, weights {'unchanged' if unchanged else 'changed'}"
    limit = "stopped, weights unchanged"
    yield CheckRow.verdict("a loss that is not finite", stopped and unchanged, value=text, limit=limit, advice=advice)
    if (reason := unavailable(setup.kind, "16")) is not None:
        yield CheckRow("a gradient that overflows in fp16", "not applicable", reason)
        return
    task = open_task(tiny_config(device=setup.device, precision="16", out=str(setup.folder / "overflow-16")))
    yield check_loss_scale(task, batches, advice)


def step_with_overflow(task: PretrainTask, batch: Batch) -> tuple[bool, bool]:
    """Train a step on infinite images; return whether it raised an error and whether the weights are as before."""
    before = trained_weights(task)
    stopped = True
    with contextlib.suppress(UserError):
        task.training_step(replace(batch, views=tuple(view * float("inf") for view in batch.views)))
        stopped = False
    return stopped, torch.equal(trained_weights(task), before)


def check_loss_scale(task: PretrainTask, batches: list[Batch], advice: str) -> CheckRow:
    """Train a step with a loss scale that overflows: it must be skipped and lower the scale."""
    precision = task.fabric.strategy.precision
    task.training_step(batches[0])
    precision.load_state_dict({**precision.state_dict(), "scale": OVERFLOWING_SCALE})
    before = trained_weights(task)
    task.training_step(batches[1])
    unchanged = torch.equal(trained_weights(task), before)
    lowered = precision.state_dict()["scale"] < OVERFLOWING_SCALE
    value = f"weights {'unchanged' if unchanged else 'changed'}, loss scale {'lowered' if lowered else 'kept'}"
    return CheckRow.verdict(
        "a gradient that overflows in fp16", unchanged and lowered, value=value,
        limit="weights unchanged, loss scale lowered", advice=advice,
    )  # fmt: skip


def check_host_waits(setup: Setup) -> Iterator[CheckRow]:
    """Count the waits in the last of `TINY_STEPS` steps of every method; loader and metrics are not part of it."""
    if setup.kind != "cuda":
        yield CheckRow("all methods", "not applicable", f"only CUDA reports waits; the device is {setup.device}")
        return
    for name in METHODS:
        task = open_task(tiny_config(name, device=setup.device, out=str(setup.folder / "waits")))
        *first, last = (task.fabric.to_device(batch) for batch in tiny_batches(name, task.config.image_size))
        for batch in first:
            task.training_step(batch)
        with recorded_waits() as waits:
            task.training_step(last)
        yield CheckRow.at_most(
            name, sum(waits.values()), MOST_WAITS,
            advice="Training is right but slower than it could be: please report these lines.",
            details=tuple(f"{line}: {count}" for line, count in sorted(waits.items())),
        )  # fmt: skip


@contextlib.contextmanager
def recorded_waits() -> Iterator[Counter[str]]:
    """Count the waits that CUDA reports in the block, by line of this package."""
    found: Counter[str] = Counter()

    def record(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[package_line()] += 1

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = record
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("warn")
        yield found


def package_line() -> str:
    """Return file and line of the innermost caller in the package, outside of this module."""
    for frame in reversed(traceback.extract_stack()):
        _, found, path = frame.filename.rpartition("/snclr/")
        if found and path != "diagnostics/methods.py":
            return f"{path}:{frame.lineno}"
    return "outside of the package"
