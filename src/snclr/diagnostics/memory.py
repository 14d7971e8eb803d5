"""Memory of a step of a recipe on one rank: its peak, and the largest batch that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from snclr.diagnostics.recipe_step import random_batch, recipe_task
from snclr.diagnostics.results import CheckRow, measured, not_applicable
from snclr.diagnostics.setup import Setup
from snclr.train.pretrain_task import PretrainTask

FIRST, GRAIN = 32, 32
"""First batch that is tried, and the step between batches that are told apart."""
MOST = 4096
"""Batch at which the search ends."""


def check_memory(setup: Setup) -> Iterator[CheckRow]:
    """Measure the peak memory of a step, and search the largest batch that fits on the GPU."""
    peak, batch = f"{setup.recipe}: peak of a step", f"{setup.recipe}: largest batch on one GPU"
    if setup.kind != "cuda":
        yield not_applicable("memory", peak, f"the device is {setup.device}; for a process see `snclr plan`")
        yield not_applicable("memory", batch, f"the device is {setup.device}; only a GPU refuses a batch")
        return
    task = recipe_task(setup)
    images = task.config.batch_size
    torch.cuda.reset_peak_memory_stats(setup.device)
    task.training_step(random_batch(task, images))
    megabytes = torch.cuda.max_memory_allocated(setup.device) / 1e6
    yield measured("memory", peak, f"{megabytes / 1000:.2f} GB of tensors for {images} images", megabytes)
    if setup.quick:
        yield not_applicable("memory", batch, "not run with --quick")
        return
    largest = largest_batch(lambda size: fits(task, size))
    yield measured("memory", batch, f"{largest} images" if largest < MOST else f"at least {MOST} images", largest)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of `GRAIN` up to `MOST` that fits; 0 if none does.

    >>> largest_batch(lambda size: size <= 700)
    672
    """
    size = FIRST
    if not fits(size):
        return 0
    while size < MOST and fits(2 * size):
        size *= 2
    if size >= MOST:
        return MOST
    low, high = size, 2 * size  # low fits, high does not
    while high - low > GRAIN:
        middle = (low + high) // 2 // GRAIN * GRAIN
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(task: PretrainTask, images: int) -> bool:
    """Return whether a step with this many images fits into the memory of the GPU."""
    try:
        task.training_step(random_batch(task, images))
    except torch.OutOfMemoryError:
        return False
    finally:
        task.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    return True
