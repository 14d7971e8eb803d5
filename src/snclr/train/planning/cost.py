"""Measure some training steps: their time and memory with a full queue, and the quality of their neighbors."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint.state import collect
from snclr.methods.common.queue import NeighborQueue
from snclr.runtime.device import limit_threads
from snclr.runtime.progress import Progress
from snclr.train.build import build_task
from snclr.train.config import resolve
from snclr.train.health import health
from snclr.train.pretrain import launch_run

WARMUP_STEPS = 3
"""Steps before the measurement: the first steps allocate memory and wait for the data workers."""


def measure_cost(settings: Mapping[str, Any], *, steps: int, quiet: bool = True) -> dict[str, Any]:
    """Run `steps` real training steps without a run directory; return seconds per step and memory.

    Every queue is filled with random features first, so that each search covers its whole length.
    """
    config = resolve({**settings, "out": "unused"})
    task = build_task(config, launch_run(config))
    queues = [module for module in task.module.modules() if isinstance(module, NeighborQueue)]
    for queue in queues:
        generator = torch.Generator().manual_seed(config.seed)
        features = torch.randn(queue.capacity, queue.features.shape[1], generator=generator)
        device, keys = queue.features.device, queue.search_features
        ids = -2 - torch.arange(queue.capacity, device=device)  # of no image of the dataset, and all different
        queue.push(features.to(device), ids, None if keys is None else torch.randn(keys.shape, device=device))
    durations: list[float] = []
    ends: list[float] = []
    cpu_ends: list[float] = []
    batches: Any = task.loader.batches(0, WARMUP_STEPS + steps)
    with (
        limit_threads(config.threads),
        Progress("measuring", WARMUP_STEPS + steps, unit="steps", quiet=quiet) as progress,
        contextlib.closing(batches),
    ):
        for batch in batches:
            start = time.perf_counter()
            task.training_step(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            cpu_ends.append(time.process_time())
            durations.append(ends[-1] - start)
            progress.update(1)
    return {
        "seconds_per_step": statistics.median_high(durations[WARMUP_STEPS:]),
        "seconds": round(sum(durations), 3), "steps": steps,
        "queue_mb": round(sum(queue.features.nbytes for queue in queues) / 1e6, 3),
        "seconds_with_views": (ends[-1] - ends[WARMUP_STEPS - 1]) / steps,
        "cpu_seconds_per_step": (cpu_ends[-1] - cpu_ends[WARMUP_STEPS - 1]) / steps,
        "state_mb": sum(tensor.nbytes for tensor in collect(task.module, task.optimizer.optimizer).values()) / 1e6,
        **peak_memory(),
    }  # fmt: skip


def probe_neighbors(settings: Mapping[str, Any], *, minutes: float) -> dict[str, float]:
    """Train for some minutes without a run directory; return the mean health metrics of the last fifth of the time.

    There is no warm-up of the learning rate, so that a short training changes the features. "steps" is the number of
    steps.
    """
    config = resolve({**settings, "out": "unused", "warmup_epochs": 0.0})
    task = build_task(config, launch_run(config))
    labels = None if task.dataset.labels is None else torch.from_numpy(task.dataset.labels).to(task.fabric.device)
    batches: Any = task.loader.batches(0, task.total_steps)
    found: list[dict[str, float]] = []
    start, step = time.monotonic(), 0
    with limit_threads(config.threads), contextlib.closing(batches):
        for step, batch in enumerate(batches, start=1):
            output, _, _ = task.training_step(batch)
            spent = (time.monotonic() - start) / (60 * minutes)
            if spent > 0.8 or step == task.total_steps:
                found.append(health(output, labels, batch.ids, task.module.queue))
            if spent > 1:
                break
    names = {name for values in found for name in values}
    return {"steps": step} | {n: statistics.fmean(values[n] for values in found if n in values) for n in sorted(names)}


def peak_memory() -> dict[str, Any]:
    """Return the peak memory in MB (10⁶ bytes): of tensors on a GPU, else of this process without data workers."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return {"peak_mb": round(torch.cuda.max_memory_allocated() / 1e6, 1), "memory": "cuda"}
    if (status := Path("/proc/self/status")).exists():  # ru_maxrss starts at the size of the parent process
        size = int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    else:
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_mb": round(size / 1e6, 1), "memory": "process"}
