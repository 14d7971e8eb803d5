"""`pretrain`: one call from settings to a trained encoder in a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from snclr.config import PretrainConfig, resolve
from snclr.data.loader import Skip, ViewLoader
from snclr.data.sources import Source
from snclr.distributed import broadcast_object, together
from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.export.encoder import save_encoder
from snclr.progress import Progress
from snclr.sync_batch_norm import synchronise_batch_norm
from snclr.train import state
from snclr.train.build import build_method, encoder_spec, view_groups
from snclr.train.checkpoint import Checkpoint, save_checkpoint
from snclr.train.inputs import check_data, count_classes, find_checkpoint, initialise, open_data
from snclr.train.launch import launch
from snclr.train.loop import Training, train
from snclr.train.metrics import MetricsLog
from snclr.train.optim import build_optimizer, scaled_lr
from snclr.train.run_folder import RunFolder, write_atomic
from snclr.train.saved_run import resume_config
from snclr.train.signals import StopRequest
from snclr.train.watch import Watch, watched

_log = logging.getLogger("snclr")


@dataclass(frozen=True)
class PretrainResult:
    """How a run ended. `exit_code` is 0 when it is complete, 130 or 143 when it was stopped and can go on."""

    out: Path
    step: int
    total_steps: int
    skipped: int
    exit_code: int

    @property
    def complete(self) -> bool:
        """Whether every step was done."""
        return self.step == self.total_steps


def pretrain(*, quiet: bool = False, **settings: Any) -> PretrainResult:
    """Train an encoder. The settings are those of `PretrainConfig`, which are the flags of `snclr pretrain`.

    With `resume=True` the settings are those of the run; what is given may only say where and how it runs.
    """
    config = resume_config(settings) if settings.get("resume") else resolve(settings)
    _refuse_missing(config, also_data=not config.resume)
    fabric = launch(config)
    launched, config = config, broadcast_object(config)  # process 0's reading of the run folder holds for all
    _refuse_missing(config)
    if launched.precision != config.precision:  # a machine without the run folder knows only the flags
        raise UserError(
            f"process {fabric.global_rank} was started with --precision {launched.precision}, but the run has"
            f" {config.precision}: its machine does not see {config.out}, so give it the run's own flags"
        )
    quiet = quiet or not fabric.is_global_zero
    with watched(config.timeout) as watch:
        return _pretrain(config, fabric, watch, quiet=quiet)


def _refuse_missing(config: PretrainConfig, *, also_data: bool = True) -> None:
    """Images and a folder are the two things that have no default; a run that is resumed knows its images."""
    if not config.out or (also_data and not config.data):
        missing = "out" if config.data or not also_data else "data"
        raise UserError(f"{missing} is missing: give --data (the images) and --out (the run folder)")


def _pretrain(config: PretrainConfig, fabric: Any, watch: Watch, *, quiet: bool) -> PretrainResult:
    # All that can fail on bad input comes before the folder: a mistyped name leaves nothing behind.
    source = open_data(config.data)
    # As process 0 sees it: other machines need neither the run folder nor, on resuming, the weights it began with.
    fresh = broadcast_object(not (config.resume and RunFolder(config.out).has_checkpoints()))
    with together():
        loader = build_loader(config, source, fabric)
        spec = encoder_spec(config)
        method = build_method(config, spec, classes=count_classes(source))
        if config.init_from is not None and fresh:
            initialise(method.encoders, spec, config.init_from, quiet=quiet)
    with together():
        run = RunFolder(config.out)
        if fabric.is_global_zero:  # it alone holds the lock
            run = RunFolder.create(config.out, resume=config.resume, overwrite=config.overwrite)
    with run as folder, _log_file(folder, enabled=fabric.is_global_zero):
        checkpoint = find_checkpoint(folder, fabric) if config.resume else None
        training = prepare(config, fabric, folder, source, loader, method, checkpoint)
        training.reached = watch.reached
        with threads_set_to(config.threads):
            return _run(training, spec, checkpoint, quiet=quiet)


def build_loader(config: PretrainConfig, source: Source, fabric: Any) -> ViewLoader:
    """The loader of this process's share of every batch."""
    return ViewLoader(
        source, views=view_groups(config), image_size=config.image_size, batch_size=config.batch_size, seed=config.seed,
        workers=config.workers, rank=fabric.global_rank, world_size=fabric.world_size, device=fabric.device,
        max_bad_share=config.max_bad_share,
    )  # fmt: skip


def _run(t: Training, spec: EncoderSpec, checkpoint: Checkpoint | None, *, quiet: bool) -> PretrainResult:
    """Train in the run's folder and leave the encoder there."""
    main = t.fabric.is_global_zero
    if main:
        kept = {**t.config.to_dict(), "resume": False, "overwrite": False}
        write_atomic(t.run.config, yaml.safe_dump(kept, sort_keys=False))
    step, exit_code = _train(t, 0 if checkpoint is None else checkpoint.step, quiet)
    with together():
        if main:
            _write_skipped(t.run, t.loader)
            if step == t.total_steps:
                save_encoder(t.core.encoder, spec, t.run.path, extra=_origin(t.config, step))
    return PretrainResult(t.run.path, step, t.total_steps, len(t.loader.skipped), exit_code)


def prepare(
    config: PretrainConfig, fabric: Any, run: RunFolder, source: Source, loader: ViewLoader, method: Any,
    checkpoint: Checkpoint | None,
) -> Training:  # fmt: skip
    """Move everything to its device, wrap it, and put a checkpoint's state back."""
    method = synchronise_batch_norm(method.to(fabric.device))
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
    fingerprint = source.fingerprint()
    if checkpoint is not None:
        check_data(checkpoint, fingerprint, config)
        state.restore(checkpoint.tensors, checkpoint.info["optimizer"], method, optimizer)
        fabric.strategy.precision.load_state_dict(checkpoint.info["precision"])
        loader.restore_skipped([Skip(**entry) for entry in checkpoint.info["skipped"]])

    def save(step: int) -> None:
        with together():
            if not fabric.is_global_zero:
                return
            tensors, plain = state.collect(method, optimizer)
            info = {
                "optimizer": plain,
                "precision": fabric.strategy.precision.state_dict(),  # the loss scale of half precision; else empty
                "data": fingerprint,
                "skipped": [asdict(skip) for skip in loader.skipped],
            }
            save_checkpoint(run.checkpoints, tensors, info, step=step, keep=config.keep_checkpoints)
            _write_skipped(run, loader)

    labels = None if source.labels is None else torch.from_numpy(source.labels).to(fabric.device)
    return Training(config, fabric, wrapped, method, wrapped_optimizer, loader, run, len(source), labels, save)


def _train(t: Training, start: int, quiet: bool) -> tuple[int, int]:
    """The loop with its progress, metrics and signals: steps done and exit code."""
    main = t.fabric.is_global_zero
    metrics = MetricsLog(t.run.path, resume_step=start or None) if main else None
    batch = t.config.batch_size
    progress = Progress("pretrain", t.total_steps * batch, initial=start * batch, quiet=quiet)
    try:
        with StopRequest() as stop, progress:
            progress.say(_opening(t, start))
            step = train(t, start_step=start, metrics=metrics, progress=progress, stop=stop)
            if stop.requested is not None and step < t.total_steps:
                name = stop.requested.name
                progress.say(
                    f"stopped by {name} after step {step} of {t.total_steps}; everything is saved. Go on with:\n"
                    f"  snclr pretrain --resume --out {t.run.path}"
                )
                return step, stop.exit_code
            return step, 0
    finally:
        if metrics is not None:
            metrics.close()


def _opening(t: Training, start: int) -> str:
    """What is about to happen, in two lines."""
    c, n = t.config, t.loader
    data = f"{t.images:,} images of {c.data}"
    begin = (
        f"resuming after step {start} of {t.total_steps}"
        if start
        else f"{c.epochs} epochs of {n.steps_per_epoch} steps"
    )
    line = f"{c.method} ({c.recipe}): {c.encoder} at {c.image_size} px on {data}, {begin}, on {t.fabric.device}"
    if (processes := t.fabric.world_size) > 1:
        line += f", {processes} processes"
    _log.info(line)
    return line


def _origin(config: PretrainConfig, step: int) -> dict[str, Any]:
    """Where the weights come from, for config.json."""
    keep = ("method", "recipe", "data", "epochs", "batch_size", "seed")
    return {**{name: getattr(config, name) for name in keep}, "steps": step}


def _write_skipped(run: RunFolder, loader: ViewLoader) -> None:
    """The bad images and why, one JSON object a line."""
    write_atomic(run.skipped, "".join(json.dumps(asdict(skip)) + "\n" for skip in loader.skipped))


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """Train with that many threads (0: torch's own choice)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _log_file(run: RunFolder, *, enabled: bool) -> Iterator[None]:
    """Everything said also goes to train.log, with the time."""
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
