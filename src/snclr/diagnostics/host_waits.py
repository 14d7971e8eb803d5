"""Waits of the host for the device in a training step, as CUDA reports them."""

from __future__ import annotations

import collections
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from snclr.diagnostics.results import CheckRow, at_most, not_applicable
from snclr.diagnostics.setup import Setup, on_device, open_task, tiny_batches, tiny_config
from snclr.methods.config import METHODS

LIMIT = 4
"""Most waits (synchronizations) in a step; each drains the GPU's queue of kernels. tests/device/host_waits.json has the
exact number of every method."""
_MESSAGE = "synchronizing CUDA operation"


def check_host_waits(setup: Setup) -> Iterator[CheckRow]:
    """Count the waits in the last of `TINY_STEPS` steps of every method; loader and metrics are not part of it."""
    if setup.kind != "cuda":
        yield not_applicable("host waits", "all methods", f"only CUDA reports waits; the device is {setup.device}")
        return
    for name in METHODS:
        task = open_task(tiny_config(name, device=setup.device, out=str(setup.folder / "waits")))
        *first, last = (on_device(batch, task.fabric.device) for batch in tiny_batches(name, task.config.image_size))
        for batch in first:
            task.training_step(batch)
        with recorded_waits() as waits:
            task.training_step(last)
        yield at_most(
            "host waits", name, sum(waits.values()), LIMIT, advice="Training is right but slower than it could be:"
            " please report these lines.",
            details=tuple(f"{line}: {count}" for line, count in sorted(waits.items())),
        )  # fmt: skip


@contextlib.contextmanager
def recorded_waits() -> Iterator[collections.Counter[str]]:
    """Count the waits that CUDA reports in the block, by line of this package."""
    found: collections.Counter[str] = collections.Counter()

    def record(message: Warning | str, *_: Any, **__: Any) -> None:
        if _MESSAGE in str(message):
            found[package_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        if not torch.cuda.is_available():
            yield found
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def package_line() -> str:
    """Return file and line of the innermost caller in the package, outside of this module."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/snclr/")
        if found and not path.startswith("diagnostics/host_waits"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the package"
