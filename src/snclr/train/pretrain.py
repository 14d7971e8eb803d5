"""Pre-train an encoder: from settings to a run directory with checkpoints, metrics and the encoder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from snclr.checkpoint.encoder_file import save_encoder
from snclr.checkpoint.foreign import read_weights
from snclr.checkpoint.format import Checkpoint
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.loader import ViewLoader
from snclr.data.open_on_ranks import open_on_all_ranks
from snclr.distributed.collectives import (
    broadcast_object,
    check_equal_across_ranks,
    name_missing_ranks,
    raise_on_all_ranks,
)
from snclr.distributed.launch import launch
from snclr.distributed.sync_batch_norm import synchronize_batch_norm
from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.models.encoders import EncoderSpec
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.runtime.threads import limit_threads
from snclr.train.build import build_method, encoder_spec, view_groups
from snclr.train.config import PretrainConfig, resolve
from snclr.train.metrics import MetricsLog
from snclr.train.optim import build_optimizer, scaled_lr
from snclr.train.pretrain_task import PretrainTask
from snclr.train.run_loader import resume_config
from snclr.train.trainer import Trainer, load_checkpoint

_log = logging.getLogger("snclr")


@dataclass(frozen=True)
class PretrainResult:
    """A completed run."""

    out: Path
    step: int
    total_steps: int
    skipped: int
    """Images that could not be read."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "out": str(self.out), "step": self.step, "total_steps": self.total_steps, "skipped": self.skipped,
            "exit_code": 0, "complete": True,
        }  # fmt: skip


def pretrain(*, config: str | Path | None = None, quiet: bool = False, **settings: Any) -> PretrainResult:
    """Train an encoder with the settings of `PretrainConfig`; `settings` win over those in the file `config`.

    With `resume=True` the run's own settings apply; `settings` may only change where and how it runs. A stop signal
    saves a checkpoint and raises StopRequested.
    """
    if config is not None and settings.get("resume"):
        raise UserError("config and resume exclude each other: a run is resumed with its own settings")
    given = resume_config(settings) if settings.get("resume") else resolve(settings, config)
    _require_data_and_out(given, data=not given.resume)
    fabric = launch_run(given)
    shared = broadcast_object(given)  # only rank 0 needs to see the run directory
    _require_data_and_out(shared)
    if given.precision != shared.precision:
        raise UserError(
            f"rank {fabric.global_rank} was started with --precision {given.precision}, but the run uses"
            f" {shared.precision}. Its node does not see {shared.out}: give it the flags of the run."
        )
    quiet = quiet or not fabric.is_global_zero
    with name_missing_ranks():
        return _pretrain(shared, fabric, quiet=quiet)


def launch_run(config: PretrainConfig) -> Any:
    """Start the ranks of a run."""
    return launch(
        accelerator=config.accelerator, devices=config.devices, nodes=config.nodes, precision=config.precision,
        timeout=config.timeout, batch_size=config.batch_size,
    )  # fmt: skip


def _require_data_and_out(config: PretrainConfig, *, data: bool = True) -> None:
    if not config.out or (data and not config.data):
        missing = "out" if config.data or not data else "data"
        raise UserError(f"{missing} is missing: give --data (the images) and --out (the run directory)")


def _pretrain(config: PretrainConfig, fabric: Any, *, quiet: bool) -> PretrainResult:
    # Check all input before creating the run directory, so that a typo leaves no files behind.
    dataset = open_data(config.data)
    # Rank 0 decides: other nodes need neither the run directory nor, when resuming, the initial weights.
    fresh = broadcast_object(not (config.resume and RunDir(config.out).has_checkpoints()))
    with raise_on_all_ranks():
        loader = build_loader(config, dataset, fabric)
        spec = encoder_spec(config)
        method = build_method(config, spec, classes=count_classes(dataset))
        if config.init_from is not None and fresh:
            initialize(method.encoders, spec, config.init_from, quiet=quiet)
    with raise_on_all_ranks():
        run = RunDir(config.out)
        if fabric.is_global_zero:  # only rank 0 holds the lock
            run = RunDir.create(config.out, resume=config.resume, overwrite=config.overwrite)
    with run, _log_file(run, enabled=fabric.is_global_zero):
        checkpoint = find_checkpoint(run, fabric) if config.resume else None
        task = prepare(config, fabric, run, dataset, loader, method)
        if fabric.is_global_zero:
            saved = {**config.to_dict(), "resume": False, "overwrite": False}
            write_atomic(run.config, yaml.safe_dump(saved, sort_keys=False))
        with limit_threads(config.threads):
            _train(task, checkpoint, opening=_opening(config, dataset, task), quiet=quiet)
        with raise_on_all_ranks():
            if fabric.is_global_zero:
                task.on_save()
                save_encoder(task.core.encoder, spec, run.path, extra=_origin(config, task.total_steps))
    return PretrainResult(run.path, task.total_steps, task.total_steps, len(loader.skipped))


def open_data(data: str) -> ImageDataset:
    """Open the training images and check that all ranks see the same ones."""
    dataset = open_on_all_ranks(lambda: open_dataset(data, split="train", download=True))
    check_equal_across_ranks(dataset.fingerprint, f"images in {data}")
    return dataset


def count_classes(dataset: ImageDataset) -> int | None:
    """Return the number of classes, or None without labels."""
    return None if dataset.labels is None or len(dataset.labels) == 0 else int(dataset.labels.max()) + 1


def initialize(encoders: Sequence[torch.nn.Module], spec: EncoderSpec, init_from: str, *, quiet: bool) -> None:
    """Load the weights of another run or a weights file into every encoder, and report what was loaded."""
    weights = read_weights(init_from, spec)
    for encoder in encoders:
        encoder.load_state_dict(weights.state)
    _log.info(weights.report)
    if not quiet:
        for text in weights.warnings:
            _log.warning(text)
        print(weights.report, *(f"warning: {text}" for text in weights.warnings), sep="\n", file=sys.stderr)


def find_checkpoint(run: RunDir, fabric: Any) -> Checkpoint | None:
    """Load the newest intact checkpoint of a run on all ranks; None before the first."""
    checkpoint = load_checkpoint(run.checkpoints, fabric.device)
    with raise_on_all_ranks():
        if checkpoint is None and fabric.is_global_zero and run.has_checkpoints():
            raise UserError(
                f"no checkpoint in {run.checkpoints} can be read, and starting from step 0 would discard the run."
                " Restore a checkpoint, or start over with --overwrite instead of --resume."
            )
    return checkpoint


def build_loader(config: PretrainConfig, dataset: ImageDataset, fabric: Any) -> ViewLoader:
    """Build the loader of this rank's part of each batch."""
    return ViewLoader(
        dataset, views=view_groups(config), image_size=config.image_size, batch_size=config.batch_size,
        seed=config.seed, workers=config.workers, rank=fabric.global_rank, world_size=fabric.world_size,
        device=fabric.device, max_bad_share=config.max_bad_share,
    )  # fmt: skip


def prepare(
    config: PretrainConfig, fabric: Any, run: RunDir, dataset: ImageDataset, loader: ViewLoader, method: Any
) -> PretrainTask:
    """Move the method to its device and wrap it and its optimizer for this rank."""
    method = synchronize_batch_norm(method.to(fabric.device))
    for encoder in method.encoders:
        encoder.to(memory_format=torch.channels_last)
        if config.compile:
            encoder.compile()
    optimizer = build_optimizer(
        config.optimizer,
        method.named_parameters(),
        lr=scaled_lr(config.lr, config.batch_size),
        weight_decay=config.weight_decay,
    )
    method.train()
    wrapped, wrapped_optimizer = fabric.setup(method, optimizer)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels).to(fabric.device)
    return PretrainTask(config, fabric, wrapped, method, wrapped_optimizer, loader, run, dataset.fingerprint(), labels)


def _train(task: PretrainTask, checkpoint: Checkpoint | None, *, opening: str, quiet: bool) -> None:
    """Run the trainer with the run's metrics and stop signals."""
    config, fabric = task.config, task.fabric
    start = 0 if checkpoint is None else checkpoint.step
    metrics = MetricsLog(task.run.path, resume_step=start or None) if fabric.is_global_zero else None
    try:
        with StopFlag() as stop:
            Trainer(
                task=task, description="pretrain", checkpoints=task.run.checkpoints, stop=stop, opening=opening,
                device=fabric.device, quiet=quiet, metrics=metrics, log_every=config.log_every, epoch_lines=True,
                save_every=config.checkpoint_every or task.steps_per_epoch, keep=config.keep_checkpoints,
            ).fit(checkpoint)  # fmt: skip
    except StopRequested as request:
        _log.info(f"stopped by {request.signal.name} after step {request.step} of {request.total_steps}")
        raise
    finally:
        if metrics is not None:
            metrics.close()


def _opening(config: PretrainConfig, dataset: ImageDataset, task: PretrainTask) -> str:
    """Describe the run in one line."""
    line = (
        f"{config.method} ({config.recipe}): {config.encoder} at {config.image_size} px on {len(dataset):,} images of "
        f"{config.data}, {config.epochs} epochs of {task.steps_per_epoch} steps, on {task.fabric.device}"
    )
    if (world_size := task.fabric.world_size) > 1:
        line += f", {world_size} processes"
    _log.info(line)
    return line


def _origin(config: PretrainConfig, steps: int) -> dict[str, Any]:
    """Return the facts about the weights that config.json records."""
    names = ("method", "recipe", "data", "epochs", "batch_size", "seed")
    return {**{name: getattr(config, name) for name in names}, "steps": steps}


@contextmanager
def _log_file(run: RunDir, *, enabled: bool) -> Iterator[None]:
    """Write the log records of the block to train.log."""
    if not enabled:
        yield
        return
    handler = logging.FileHandler(run.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = _log.level
    _log.setLevel(logging.INFO)
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(before)
        handler.close()
