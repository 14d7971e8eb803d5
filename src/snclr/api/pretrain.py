"""`snclr.pretrain` trains an encoder; `snclr.plan` estimates time, memory and disk space of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.data.info import DatasetInfo
    from snclr.train.config import PretrainConfig
    from snclr.train.pretrain import PretrainResult


def pretrain(*, config: str | Path | None = None, quiet: bool = False, **settings: Any) -> PretrainResult:
    """Pre-train an encoder on images and write a run directory.

    The settings are the fields of `snclr.train.config.PretrainConfig`, such as `data`, `out`, `recipe` or `epochs`. A
    stop signal (Ctrl-C, SIGTERM, SIGUSR1) saves a checkpoint and raises StopRequested; `resume=True` continues.

    Args:
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        quiet: Print no progress.
        settings: Values for the fields of `PretrainConfig`; the recipe supplies the rest.
    """
    from snclr.train.pretrain import pretrain

    return pretrain(config=config, quiet=quiet, **settings)


@dataclass(frozen=True)
class QueuePlan:
    """The queue of a planned run."""

    length: int
    mb: float
    epochs_of_life: float
    """Epochs that a feature stays in the queue."""
    share_of_images: float
    """Share of the images that have a feature in the queue."""
    neighbors: int | None = None
    """K, for methods that use neighbors."""
    same_class: float | None = None
    """Expected number of features of an image's own class, if the images have labels."""


@dataclass(frozen=True)
class RunPlan:
    """The size and cost of a planned run. Seconds per step and memory are measured, totals are calculated."""

    images: int
    batch_size: int
    processes: int
    epochs: int
    steps_per_epoch: int
    steps: int
    tried_steps: int
    """Training steps that were measured."""
    compute_seconds_per_step: float
    """Without the time spent waiting for views."""
    seconds_per_step: float
    images_per_second: float
    total_seconds: float
    peak_mb: float
    memory: str
    """What `peak_mb` counts: "cuda" (tensors on the GPU) or "process" (the training process without data workers)."""
    checkpoint_mb: float
    keep_checkpoints: int
    queue: QueuePlan | None
    """None for methods without a queue."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        queue = self.queue and {name: value for name, value in asdict(self.queue).items() if value is not None}
        return {**asdict(self), "queue": queue}


def plan(*, config: str | Path | None = None, steps: int = 10, **settings: Any) -> RunPlan:
    """Estimate time, memory and disk space of a run by training a few steps of it; nothing is written.

    With several devices or nodes, one rank is measured with its part of the batch.

    Args:
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        steps: Training steps to measure.
        settings: Those of `snclr.pretrain`.
    """
    from snclr.data.info import inspect_dataset
    from snclr.data.sampler import steps_per_epoch
    from snclr.distributed.launch import check_batch_size
    from snclr.train.config import resolve
    from snclr.train.cost import measure_cost

    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    run = resolve({**settings, "out": "unused"}, config)
    data, processes = inspect_dataset(run.data), _world_size(run)
    epoch_steps = steps_per_epoch(data.images, run.batch_size)
    check_batch_size(run.batch_size, processes)
    share = {"batch_size": run.batch_size // processes, "devices": "1", "nodes": 1}
    cost = measure_cost({**run.to_dict(), **share}, steps=steps)
    seconds = cost["seconds_with_views"]
    return RunPlan(
        images=data.images, batch_size=run.batch_size, processes=processes, epochs=run.epochs,
        steps_per_epoch=epoch_steps, steps=epoch_steps * run.epochs, tried_steps=steps,
        compute_seconds_per_step=cost["seconds_per_step"], seconds_per_step=seconds,
        images_per_second=run.batch_size / seconds, total_seconds=seconds * epoch_steps * run.epochs,
        peak_mb=cost["peak_mb"], memory=cost["memory"], checkpoint_mb=cost["state_mb"],
        keep_checkpoints=run.keep_checkpoints, queue=_plan_queue(run, data, cost["queue_mb"]),
    )  # fmt: skip


def _world_size(config: PretrainConfig) -> int:
    import torch

    per_node = max(1, torch.cuda.device_count()) if config.devices == "auto" else int(config.devices)
    return per_node * config.nodes


def _plan_queue(config: PretrainConfig, data: DatasetInfo, megabytes: float) -> QueuePlan | None:
    from snclr.methods import METHODS

    used = METHODS[config.method].setting_names()
    if "queue_length" not in used:
        return None
    pushed_per_epoch = data.images * (2 if "push" in used and config.push == "both" else 1)
    epochs = config.queue_length / pushed_per_epoch
    return QueuePlan(
        config.queue_length, megabytes, epochs, min(1.0, epochs), config.neighbors if "neighbors" in used else None,
        None if data.same_class is None else data.same_class * config.queue_length,
    )  # fmt: skip
