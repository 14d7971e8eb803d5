"""Memory of a step of a recipe on one rank: its peak, and the largest batch that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

from snclr.diagnostics.recipe_step import random_batch, recipe_task, training_math
from snclr.diagnostics.results import CheckRow, measured, not_applicable
from snclr.diagnostics.setup import Setup
from snclr.train.pretrain_task import PretrainTask

GRAIN = 32
"""Smallest batch that is tried, and the resolution of the search."""
MOST = 4096
"""Largest batch that is tried."""


def check_memory(setup: Setup) -> Iterator[CheckRow]:
    """Measure the peak memory of a step, and find the largest batch that fits on the GPU."""
    peak, batch = f"{setup.recipe}: peak of a step", f"{setup.recipe}: largest batch on one GPU"
    if setup.kind != "cuda":
        yield not_applicable("memory", peak, f"only for CUDA; `snclr plan` measures a process on {setup.device}")
        yield not_applicable("memory", batch, f"only for CUDA; the device is {setup.device}")
        return
    task = recipe_task(setup)
    images = task.config.batch_size
    with training_math(task):
        task.training_step(random_batch(task, images))  # allocates the state of the optimizer
        torch.cuda.reset_peak_memory_stats(setup.device)
        task.training_step(random_batch(task, images))
    megabytes = torch.cuda.max_memory_allocated(setup.device) / 1e6
    yield measured("memory", peak, f"{megabytes / 1000:.2f} GB of tensors for {images} images", megabytes)
    if setup.quick:
        yield not_applicable("memory", batch, "not run with --quick")
        return
    with training_math(task):
        largest = largest_batch(lambda size: step_fits(task, size))
    yield measured("memory", batch, f"{largest} images" if largest < MOST else f"at least {MOST} images", largest)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of `GRAIN` up to `MOST` that fits; 0 if none does.

    >>> largest_batch(lambda size: size <= 700)
    672
    """
    size = GRAIN
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


def step_fits(task: PretrainTask, images: int) -> bool:
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
