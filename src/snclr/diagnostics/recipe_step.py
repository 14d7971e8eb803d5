"""A training step of the recipe to measure: its task, batches of any size, and the time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from snclr.data.loader import Batch
from snclr.diagnostics.setup import Setup, open_task, synchronize, write_photos
from snclr.train.build import view_sizes
from snclr.train.config import resolve
from snclr.train.pretrain_task import PretrainTask

MOST_IMAGES = {"cuda": 256, "mps": 64, "cpu": 128}
"""Images of a measured step, at most: enough for full speed, and few enough for about a second per step."""


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
    queue = task.module.queue
    if queue is not None:
        features = torch.randn(queue.features.shape, generator=torch.Generator().manual_seed(0))
        ids = -2 - torch.arange(queue.capacity)  # of no image
        queue.push(features.to(queue.features.device), ids.to(queue.features.device))
    return task


def random_batch(task: PretrainTask, images: int) -> Batch:
    """Return a batch of random views on the device of the task."""
    device, step = task.fabric.device, 0
    views = tuple(
        torch.randn(images, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        for size in view_sizes(task.config)
    )
    ids = torch.arange(images, device=device)
    return Batch(ids, views, torch.zeros_like(ids), 0, step)


def milliseconds(run: Callable[[], Any], device: str, *, repeats: int) -> float:
    """Return the median time of a call, until the device is done, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])
