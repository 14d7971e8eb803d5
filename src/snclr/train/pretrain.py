"""Pre-train an encoder: from settings to a run directory with checkpoints, metrics and the encoder."""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from snclr.checkpoint.encoder_file import save_encoder
from snclr.checkpoint.format import Checkpoint
from snclr.checkpoint.run_dir import RunDir, no_run_to_resume
from snclr.distributed.collectives import broadcast_object, name_missing_ranks, raise_on_all_ranks
from snclr.distributed.launch import launch
from snclr.errors import UserError, count
from snclr.io.atomic import write_atomic
from snclr.methods.config import QueueConfig
from snclr.runtime.device import limit_threads, math_settings
from snclr.runtime.progress import set_status
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.build import build_task
from snclr.train.config import PretrainConfig, require_paths, resolve
from snclr.train.load_run import config_for_resume
from snclr.train.metrics import MetricsLog
from snclr.train.pretrain_task import PretrainTask
from snclr.train.sessions import record_session
from snclr.train.trainer import Trainer, load_latest_checkpoint

_log = logging.getLogger("snclr")


@dataclass(frozen=True)
class PretrainResult:
    """A completed run."""

    out: Path
    step: int
    total_steps: int
    skipped: int
    """Images that could not be read."""
    labeled: bool = False
    """Whether the images have labels, which evaluations use."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "out": str(self.out), "exit_code": 0, "complete": True}


def pretrain(*, config: str | Path | None = None, quiet: bool = False, **settings: Any) -> PretrainResult:
    """Train an encoder with the settings of `PretrainConfig`; `settings` win over those in the file `config`.

    With `resume=True` the run's own settings apply; `settings` may only change where and how it runs. A stop signal
    saves a checkpoint and raises StopRequested.
    """
    if config is not None and settings.get("resume"):
        raise UserError(
            "config and resume=True exclude each other: a run is resumed with its own settings. Omit config."
        )
    local = config_for_resume(settings) if settings.get("resume") else resolve(settings, config)
    if not local.resume:  # a run may be on the disk of rank 0 only
        require_paths(local)
    fabric = launch_run(local)
    shared = broadcast_object(local)  # the config of rank 0, since other nodes may not see the run directory
    with raise_on_all_ranks():
        if fabric.is_global_zero and shared.resume and not RunDir(shared.out).config.is_file():
            if not shared.data:
                raise no_run_to_resume(shared.out)
            if not quiet:  # job scripts rely on --resume starting a new run
                print(f"no run in {shared.out}: starting a new one", file=sys.stderr)
    require_paths(shared)
    if local.precision != shared.precision:
        raise UserError(
            f"rank {fabric.global_rank} was started with --precision {local.precision}, but the run uses"
            f" {shared.precision}. Its node does not see {shared.out}: give it the flags of the run."
        )
    with name_missing_ranks(), math_settings(fabric.device, tf32=shared.tf32, deterministic=shared.deterministic):
        return _pretrain(shared, fabric, quiet=quiet or not fabric.is_global_zero)


def launch_run(config: PretrainConfig) -> Any:
    """Start the ranks of a run."""
    return launch(
        device=config.device, devices=config.devices, nodes=config.nodes, precision=config.precision,
        timeout=config.timeout, batch_size=config.batch_size,
    )  # fmt: skip


def _pretrain(config: PretrainConfig, fabric: Any, *, quiet: bool) -> PretrainResult:
    # Rank 0 decides: other nodes need neither the run directory nor, when resuming, the initial weights.
    resumed = broadcast_object(config.resume and RunDir(config.out).has_checkpoints())
    # Check all input before creating the run directory, so that a typo leaves no files behind.
    task = build_task(config, fabric, init_from=None if resumed else config.init_from, resumed=resumed)
    config = task.config
    with (
        StopFlag() as stop,
        _open_run(task) as run,
        _log_file(run) if fabric.is_global_zero else nullcontext(),
    ):
        checkpoint = _find_checkpoint(run, fabric) if config.resume else None
        if fabric.is_global_zero:
            saved = {**config.to_dict(), "resume": False, "overwrite": False}
            write_atomic(run.config, yaml.safe_dump(saved, sort_keys=False))
        session = record_session(run, fabric.device, fabric.world_size) if fabric.is_global_zero else nullcontext()
        with limit_threads(config.threads), session:
            _train(task, checkpoint, stop, quiet=quiet)
        set_status("writing the encoder")
        with raise_on_all_ranks():
            if fabric.is_global_zero:
                task.on_save(task.total_steps)
                names = ("method", "recipe", "data", "epochs", "batch_size", "seed")
                origin = {**{name: getattr(config, name) for name in names}, "steps": task.total_steps}
                save_encoder(task.module.exported_encoder, task.spec, run.path, extra=origin)
    labeled = task.dataset.labels is not None
    return PretrainResult(run.path, task.total_steps, task.total_steps, len(task.loader.skipped), labeled)


def _open_run(task: PretrainTask) -> RunDir:
    """Return the run directory; rank 0 creates and locks it, if its disk has room for the checkpoints."""
    config = task.config
    with raise_on_all_ranks():
        if task.fabric.is_global_zero:
            _check_disk_space(task)
            return RunDir.create(config.out, resume=config.resume, overwrite=config.overwrite)
    return RunDir(config.out)


def _check_disk_space(task: PretrainTask) -> None:
    """Raise UserError if the checkpoints do not fit on the disk: those to keep, and one more while it is written."""
    folder, keep, size = task.run.checkpoints, task.config.keep_checkpoints, task.checkpoint_bytes()
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = max((keep + 1) * size - present, size)
    free = shutil.disk_usage(next(path for path in folder.absolute().parents if path.is_dir())).free
    if free < needed:
        raise UserError(
            f"no space for the checkpoints in {folder}: {needed:,} bytes needed ({keep} + 1 checkpoints of {size:,}),"
            f" {free:,} free on that disk. Free some space, lower --keep-checkpoints or choose another --out."
        )


def _find_checkpoint(run: RunDir, fabric: Any) -> Checkpoint | None:
    """Load the newest intact checkpoint of a run on all ranks; None before the first."""
    checkpoint = load_latest_checkpoint(run.checkpoints, fabric.device)
    with raise_on_all_ranks():
        if checkpoint is None and fabric.is_global_zero and run.has_checkpoints():
            raise UserError(
                f"no checkpoint in {run.checkpoints} can be read, and starting from step 0 would discard the run."
                " Restore a checkpoint, or start over with --overwrite instead of --resume."
            )
    return checkpoint


def _train(task: PretrainTask, checkpoint: Checkpoint | None, stop: StopFlag, *, quiet: bool) -> None:
    """Run the trainer with the run's metrics."""
    config, fabric, run = task.config, task.fabric, task.run
    start_message = (
        f"{config.method} ({config.recipe}): {config.encoder} at {config.image_size} px on"
        f" {count(len(task.dataset), 'image')} of {config.data}, {count(config.epochs, 'epoch')} of"
        f" {count(task.steps_per_epoch, 'step')}, on {fabric.device}"
    )
    if fabric.world_size > 1:
        start_message += f", {fabric.world_size} ranks"
    if isinstance(config.method_config, QueueConfig):
        start_message += f", queue of {count(config.queue_length, 'feature')}"
        if config.queue_length > len(task.dataset) and checkpoint is None:
            start_message += (
                f"\nwarning: --queue-length {config.queue_length} is more than the number of images: the queue holds"
                " several features of an image, and it can be selected as a neighbor more than once"
            )
    start_message = "\n".join([*task.initial_weights, start_message])
    _log.info(start_message)
    resume_step = None if checkpoint is None else checkpoint.step
    metrics = MetricsLog(run.path, resume_step=resume_step) if fabric.is_global_zero else None
    with metrics or nullcontext():
        trainer = Trainer(
            task=task, description="pretrain", checkpoints=run.checkpoints, stop=stop, start_message=start_message,
            quiet=quiet, metrics=metrics, log_every=config.log_every, epoch_lines=True,
            save_every=config.checkpoint_every or task.steps_per_epoch, keep=config.keep_checkpoints,
        )  # fmt: skip
        try:
            trainer.fit(checkpoint)
        except StopRequested as request:
            _log.info(f"stopped by {request.signal.name} after step {request.step} of {request.total_steps}")
            raise


@contextmanager
def _log_file(run: RunDir) -> Iterator[None]:
    """Write the log records of the block to train.log."""
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
