"""Measure seconds per step and memory of some training steps with a full queue."""

from __future__ import annotations

import contextlib
import time
from typing import Any

WARMUP_STEPS = 3
"""Steps before the measurement: the first steps allocate memory and wait for the data workers."""


def measure_cost(given: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Run `steps` real training steps; return median seconds, queue size and peak memory.

    The queue is filled with random features first, so that every search covers its whole length.
    """
    import torch

    from snclr.benchmark.worker import peak_memory
    from snclr.runtime.threads import limit_threads
    from snclr.train.config import resolve

    config = resolve({**given, "out": "unused"})
    trainer = _build_trainer(config)
    queue = trainer.module.queue
    if queue is not None:
        generator = torch.Generator().manual_seed(config.seed)
        features = torch.randn(queue.length, queue.features.shape[1], generator=generator)
        queue.push(features.to(queue.features.device), torch.full((queue.length,), -2, device=queue.ids.device))
    durations: list[float] = []
    ends: list[float] = []
    with limit_threads(config.threads), contextlib.closing(trainer.loader.batches(0, WARMUP_STEPS + steps)) as batches:
        for batch in batches:
            start = time.perf_counter()
            trainer.training_step(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            durations.append(ends[-1] - start)
    measured = sorted(durations[WARMUP_STEPS:])
    queue_mb = 0.0 if queue is None else queue.features.nbytes / 1e6
    return {
        "numbers": {"seconds_per_step": measured[len(measured) // 2]},
        "protocols": {"cost": f"median of {steps} steps after {WARMUP_STEPS} warm-up steps; full queue, no data wait"},
        "cost": {
            "seconds": round(sum(durations), 3), "queue_mb": round(queue_mb, 3), "steps": steps,
            "seconds_with_views": (ends[-1] - ends[WARMUP_STEPS - 1]) / steps,
            "state_mb": _checkpoint_mb(trainer), **peak_memory(),
        },
    }  # fmt: skip


def _checkpoint_mb(trainer: Any) -> float:
    """Return the size of a checkpoint: weights, target network, queue and optimizer state."""
    from snclr.checkpoint.state import collect

    return sum(tensor.nbytes for tensor in collect(trainer.module, trainer.optimizer.optimizer)[0].values()) / 1e6


def _build_trainer(config: Any) -> Any:
    """Build a trainer, ready for its first step, without writing a run directory."""
    from snclr.train.build import build_task
    from snclr.train.pretrain import launch_run

    return build_task(config, launch_run(config))
