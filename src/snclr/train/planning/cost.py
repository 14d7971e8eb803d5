"""Short training before a run: time and memory of a step with a full queue, and the quality of the neighbors."""

import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint.state import collect_state
from snclr.methods.common.queue import NeighborQueue
from snclr.runtime.device import limit_threads, math_settings
from snclr.runtime.progress import Progress
from snclr.train.build import build_task
from snclr.train.config import resolve
from snclr.train.health import health
from snclr.train.pretrain import launch_run
from snclr.train.pretrain_task import PretrainTask

WARMUP_STEPS = 3
"""Steps before the measurement: the first steps allocate memory and wait for the data workers."""


@contextlib.contextmanager
def _short_training(settings: Mapping[str, Any], steps: int | None = None) -> Iterator[tuple[PretrainTask, Any]]:
    """Build the task of a run without a run directory; yield it and its batches of `steps` steps, or of all.

    If a loss is not finite, the images of the step are listed in a temporary folder.
    """
    config = resolve({**settings, "out": f"{tempfile.gettempdir()}/snclr-plan-{os.getpid()}"})
    task = build_task(config, launch_run(config), init_from=config.init_from)
    batches: Any = task.loader.batches(0, steps or task.total_steps)
    with (
        limit_threads(config.threads),
        math_settings(task.fabric.device, tf32=config.tf32, deterministic=config.deterministic),
        contextlib.closing(batches),
    ):
        yield task, batches


def measure_cost(
    settings: Mapping[str, Any], *, steps: int, seconds: float = math.inf, quiet: bool = True
) -> dict[str, Any]:
    """Run `steps` real training steps without a run directory; return seconds per step and memory.

    After `seconds`, the measurement ends with the first measured step. "seconds_per_step" is the median of a step
    without the wait for its views, "seconds_with_views" the mean with it, "seconds" the sum over all steps, and "steps"
    the number of measured steps.
    """
    measured: list[tuple[float, float, float]] = []  # seconds, end and CPU time of each step
    with (
        _short_training(settings, WARMUP_STEPS + steps) as (task, batches),
        Progress("measuring", WARMUP_STEPS + steps, unit="steps", quiet=quiet) as progress,
    ):
        queues = [module for module in task.module.modules() if isinstance(module, NeighborQueue)]
        for queue in queues:
            fill_queue(queue, task.config.seed)
        for batch in batches:
            start = time.perf_counter()
            task.training_step(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            end = time.perf_counter()
            measured.append((end - start, end, time.process_time()))
            spent, done = sum(step[0] for step in measured), len(measured)
            in_time = math.ceil(min(done * seconds / spent, WARMUP_STEPS + steps))  # steps that fit into `seconds`
            progress.total = max(in_time, WARMUP_STEPS + 1, done)
            progress.update(1)
            if spent > seconds and done > WARMUP_STEPS:
                break
    durations, ends, cpu_ends = zip(*measured, strict=True)
    steps = len(durations) - WARMUP_STEPS
    state = collect_state(task.module, task.optimizer.optimizer)
    return {
        "seconds_per_step": statistics.median_high(durations[WARMUP_STEPS:]),
        "seconds": round(sum(durations), 3), "steps": steps,
        "queue_mb": round(sum(queue.features.nbytes for queue in queues) / 1e6, 3),
        "seconds_with_views": (ends[-1] - ends[WARMUP_STEPS - 1]) / steps,
        "cpu_seconds_per_step": (cpu_ends[-1] - cpu_ends[WARMUP_STEPS - 1]) / steps,
        "state_mb": sum(tensor.nbytes for tensor in state.values()) / 1e6,
        **peak_memory(),
    }  # fmt: skip


def fill_queue(queue: NeighborQueue, seed: int) -> None:
    """Fill the queue with random features of images that are not in the dataset: a search covers its whole length."""
    features = torch.randn(queue.features.shape, generator=torch.Generator().manual_seed(seed))
    device, keys = queue.features.device, queue.search_features
    ids = -2 - torch.arange(queue.capacity, device=device)  # all different; -1 is a missing neighbor
    queue.push(features.to(device), ids, None if keys is None else torch.randn(keys.shape, device=device))


def probe_neighbors(settings: Mapping[str, Any], *, minutes: float, quiet: bool = True) -> dict[str, float]:
    """Train for some minutes without a run directory; return the mean health metrics of the last fifth of the time.

    There is no warm-up of the learning rate, so that a short training changes the features. Also return the number of
    steps as "steps", and as "complete" whether they are the whole run.
    """
    found: list[dict[str, float]] = []
    with (
        _short_training({**settings, "warmup_epochs": 0.0}) as (task, batches),
        Progress("probing neighbors", max(1, round(60 * minutes)), unit="", quiet=quiet) as progress,
    ):
        start, step = time.monotonic(), 0
        for step, batch in enumerate(batches, start=1):
            output, _, _ = task.training_step(batch)
            spent = (time.monotonic() - start) / (60 * minutes)
            if spent > 0.8 or step == task.total_steps:
                found.append(health(output, task.labels, batch.ids))
            progress.update(int(60 * minutes * min(1, spent)) - progress.done, values={"step": step})
            if spent > 1:
                break
    names = sorted({name for values in found for name in values})
    means = {name: statistics.fmean(values[name] for values in found if name in values) for name in names}
    return {"steps": step, "complete": step == task.total_steps, **means}


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
