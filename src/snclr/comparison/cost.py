"""Seconds a step and memory of a setting: some steps as in training, with a full queue, and nothing else."""

from __future__ import annotations

import contextlib
import time
from typing import Any

WARM_UP = 3
"""Steps before the clock starts: the first ones allocate, and wait for the loader's processes."""


def measure_cost(given: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Train `steps` steps by the real loop's step on real views; the median second, the queue's size, the peak.

    The queue is filled with random features first, so that every search runs over its whole length.
    """
    import torch

    from snclr.comparison.worker import peak_memory
    from snclr.config import resolve
    from snclr.train.loop import training_step
    from snclr.train.pretrain import threads_set_to

    config = resolve({**given, "out": "unused"})
    t = _training(config)
    queue = t.core.queue
    if queue is not None:
        generator = torch.Generator().manual_seed(config.seed)
        filler = torch.randn(queue.length, queue.features.shape[1], generator=generator)
        queue.push(filler.to(queue.features.device), torch.full((queue.length,), -2, device=queue.ids.device))
    spent: list[float] = []
    ends: list[float] = []
    with threads_set_to(config.threads), contextlib.closing(t.loader.batches(0, WARM_UP + steps)) as batches:
        for batch in batches:
            began = time.perf_counter()
            training_step(t, batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            spent.append(ends[-1] - began)
    measured = sorted(spent[WARM_UP:])
    queue_mb = 0.0 if queue is None else queue.features.nbytes / 1e6
    return {
        "numbers": {"seconds_per_step": measured[len(measured) // 2]},
        "protocols": {"cost": f"median of {steps} steps after {WARM_UP}, full queue, without waiting for views"},
        "cost": {
            "seconds": round(sum(spent), 3), "queue_mb": round(queue_mb, 3), "steps": steps,
            "seconds_with_views": (ends[-1] - ends[WARM_UP - 1]) / steps, "state_mb": _state_mb(t), **peak_memory(),
        },
    }  # fmt: skip


def _state_mb(t: Any) -> float:
    """The tensors of a checkpoint: weights, momentum copy, queue, optimiser."""
    from snclr.train.state import collect

    return sum(tensor.nbytes for tensor in collect(t.core, t.optimizer)[0].values()) / 1e6


def _training(config: Any) -> Any:
    """A run's objects, ready for its first step, without a run folder."""
    from snclr.train.build import build_method, encoder_spec
    from snclr.train.inputs import count_classes, open_data
    from snclr.train.launch import launch
    from snclr.train.pretrain import build_loader, prepare
    from snclr.train.run_folder import RunFolder

    fabric = launch(config)
    source = open_data(config.data)
    loader = build_loader(config, source, fabric)
    method = build_method(config, encoder_spec(config), classes=count_classes(source))
    return prepare(config, fabric, RunFolder(config.out), source, loader, method, None)
