"""Time and memory of a training step of a recipe on one rank: its parts, --compile, its peak, the largest batch."""

import bisect
import functools
import gc
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from snclr.data.loader import Batch
from snclr.diagnostics.setup import CheckRow, Setup, open_task, write_photos
from snclr.runtime.device import math_settings
from snclr.train.build import view_sizes
from snclr.train.config import resolve
from snclr.train.planning.cost import fill_queue
from snclr.train.pretrain_task import PretrainTask

MOST_IMAGES = {"cuda": 256, "mps": 64, "cpu": 128}
"""Images of a measured step, at most: enough for full speed, and few enough for about a second per step."""
GRAIN = 32
"""Smallest batch that is tried, and the resolution of the search."""
MOST = 4096
"""Largest batch that is tried."""
COMPILE_ERROR = 0.1
"""Largest relative difference of a compiled step's loss: fused kernels round half precision differently."""


def recipe_task(setup: Setup, **settings: Any) -> PretrainTask:
    """Build the task of the recipe on one rank of the device, with a full queue and photos of ImageNet's size."""
    recipe = resolve({"recipe": setup.recipe, "data": "demo", "out": "unused"})
    batch = min(recipe.batch_size, MOST_IMAGES[setup.kind])
    precision = "32" if setup.kind == "cpu" else recipe.precision
    photos = write_photos(setup.folder, batch)
    given = {
        "recipe": setup.recipe, "data": str(photos), "out": str(setup.folder / "speed"), "batch_size": batch,
        "neighbors": min(recipe.neighbors, batch - 1), "queue_length": recipe.queue_length, "precision": precision,
        "device": setup.device, "devices": "1", "workers": 0, "cache_images": "never", **settings,
    }  # fmt: skip
    task = open_task(resolve(given))
    if task.module.queue is not None:
        fill_queue(task.module.queue, seed=0)
    return task


def training_math(task: PretrainTask) -> AbstractContextManager[None]:
    """Run the block with the settings of torch that a run of the task has: TF32, and cuDNN's search for algorithms."""
    return math_settings(task.fabric.device, tf32=task.config.tf32, deterministic=task.config.deterministic)


def random_batch(task: PretrainTask, images: int) -> Batch:
    """Return a batch of random views on the device of the task."""
    device = task.fabric.device
    shapes = [(images, 3, size, size) for size in view_sizes(task.config)]
    views = tuple(torch.randn(shape, device=device).to(memory_format=torch.channels_last) for shape in shapes)
    ids = torch.arange(images, device=device)
    return Batch(ids, views, torch.zeros_like(ids), epoch=0, step=0)


def milliseconds(run: Callable[[], Any], device: str, *, repeats: int) -> float:
    """Return the median time of a call, until the device is done, after one call to warm up."""
    times, synchronize = [], torch.get_device_module(device).synchronize
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def check_memory(setup: Setup) -> Iterator[CheckRow]:
    """Measure the peak memory of a step, and find the largest batch that fits on the GPU."""
    peak, batch = f"{setup.recipe}: peak of a step", f"{setup.recipe}: largest batch on one GPU"
    if setup.kind != "cuda":
        yield CheckRow(peak, "not applicable", f"only for CUDA; `snclr plan` measures a process on {setup.device}")
        yield CheckRow(batch, "not applicable", f"only for CUDA; the device is {setup.device}")
        return
    task = recipe_task(setup)
    images = task.config.batch_size
    with training_math(task):
        task.training_step(random_batch(task, images))  # allocates the state of the optimizer
        torch.cuda.reset_peak_memory_stats(setup.device)
        task.training_step(random_batch(task, images))
    megabytes = torch.cuda.max_memory_allocated(setup.device) / 1e6
    yield CheckRow(peak, "measured", f"{megabytes / 1000:.2f} GB of tensors for {images} images", number=megabytes)
    if setup.quick:
        yield CheckRow(batch, "not applicable", "not run with --quick")
        return
    with training_math(task):
        largest = largest_batch(lambda size: step_fits(task, size))
    text = f"{largest} images" if largest < MOST else f"at least {MOST} images"
    yield CheckRow(batch, "measured", text, number=largest)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of `GRAIN` up to `MOST` that fits; 0 if none does.

    >>> largest_batch(lambda size: size <= 700)
    672
    """
    sizes = range(GRAIN, MOST + 1, GRAIN)
    return GRAIN * bisect.bisect_left(sizes, True, key=lambda size: not fits(size))


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


def check_speed(setup: Setup) -> Iterator[CheckRow]:
    """Measure the parts of a step of the recipe and the whole step, on one rank."""
    task = recipe_task(setup)
    images, repeats = task.config.batch_size, 2 if setup.quick else 5
    with training_math(task):
        parts = step_parts(task).items()
        times = {name: milliseconds(run, setup.device, repeats=repeats) for name, run in parts}
    note = {"data": " on one core", "loss": " (search, loss and gradient)"}
    for name, value in times.items():
        text = f"{value:.1f} ms for {images} images{note.get(name, '')}"
        yield CheckRow(f"{setup.recipe}: {name}", "measured", text, number=value)
    rate = 1000 * images / times["step"]
    text = f"{rate:,.0f} images/s, {times['encoder'] / times['step']:.0%} of the time in the encoders"
    yield CheckRow(f"{setup.recipe}: rate", "measured", text, number=rate)


def step_parts(task: PretrainTask) -> dict[str, Callable[[], Any]]:
    """Return the parts of a step as functions to time, and the whole step as "step"."""
    method, config = task.module, task.config
    batch = random_batch(task, config.batch_size)
    crops = task.loader.crop_steps[0]
    # Not the step of Fabric's optimizer: a loss scaler needs scaled gradients.
    update = getattr(task.optimizer, "optimizer", task.optimizer).step
    autocast = task.fabric.strategy.precision.forward_context

    def encoder() -> None:
        with torch.no_grad(), autocast():
            for view in batch.views[:2]:
                method.momentum_encoder(view)
        for view in batch.views[:2]:
            with autocast():
                features = method.encoder(view)
            features.float().sum().backward()
        task.optimizer.zero_grad(set_to_none=True)

    y = torch.randn(config.batch_size, config.dim, device=task.fabric.device)
    z = torch.randn_like(y).requires_grad_()

    def loss() -> None:
        for _ in range(2):
            method.criterion(y, z, y, batch.ids).loss.backward()

    def optimizer() -> None:
        for parameter in method.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        update()

    return {
        "data": lambda: task.loader.crop_steps[0], "color": lambda: task.loader.finish(crops), "encoder": encoder,
        "loss": loss, "optimizer": optimizer, "step": lambda: task.training_step(batch),
    }  # fmt: skip


def check_compile(setup: Setup) -> Iterator[CheckRow]:
    """Compare a step of the recipe with and without --compile: its loss must be the same."""
    if setup.quick:
        yield CheckRow(setup.recipe, "not applicable", "not run with --quick")
        return
    if setup.kind == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        yield CheckRow(setup.recipe, "not applicable", "torch.compile needs a C++ compiler, and there is none")
        return
    found, batch = {}, None
    for compiled in (False, True):
        task = recipe_task(setup, compile=compiled)
        batch = batch or random_batch(task, task.config.batch_size)  # the same for both
        with training_math(task):
            loss = float(task.training_step(batch)[0].loss.detach())
            found[compiled] = loss, milliseconds(functools.partial(task.training_step, batch), setup.device, repeats=3)
    (plain_loss, plain_time), (loss, compiled_time) = found[False], found[True]
    error, gain = abs(loss - plain_loss) / max(abs(plain_loss), 1e-12), plain_time / compiled_time
    times = f"({plain_time:.0f} → {compiled_time:.0f} ms)"
    yield CheckRow.verdict(
        setup.recipe, error <= COMPILE_ERROR,
        value=f"{gain:.2f} × as fast {times}, loss differs by {error:.1e}", number=gain,
        limit=f"loss differs by ≤ {COMPILE_ERROR:g}", advice="Train without --compile.",
    )  # fmt: skip
