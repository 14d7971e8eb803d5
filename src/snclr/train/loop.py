"""The training loop, top to bottom. It does not know which method it runs, nor what a file is."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snclr.config import PretrainConfig
from snclr.data.loader import Batch, ViewLoader
from snclr.distributed import barrier, fail_together, gather, gather_objects, meet, sum_over_processes
from snclr.errors import UserError
from snclr.methods.base import Method, StepOutput
from snclr.progress import Progress
from snclr.train.health import collapsed, health
from snclr.train.metrics import MetricsLog
from snclr.train.optim import scaled_lr
from snclr.train.run_folder import RunFolder, write_atomic
from snclr.train.schedule import warmup_cosine
from snclr.train.signals import StopRequest

_log = logging.getLogger("snclr")

COLLAPSE_ADVICE = (
    "the features have collapsed: all images look alike to the encoder. Try a lower --lr, a longer --warmup-epochs, a"
    " higher --momentum, or a larger --batch-size"
)


@dataclass
class Training:
    """What a loop works on. `save` writes a checkpoint of the state after `step` steps."""

    config: PretrainConfig
    fabric: Any
    method: Method  # as Fabric wraps it: forward goes through precision and data parallelism
    core: Method  # the same without the wrapper
    optimizer: Any
    loader: ViewLoader
    run: RunFolder
    images: int
    label_of_id: Tensor | None
    save: Callable[[int], None]
    reached: Callable[[int], None] = lambda step: None
    """Told of each step whose batch this process has: who is stuck is found by who has not come as far."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.loader.steps_per_epoch


def train(t: Training, *, start_step: int, metrics: MetricsLog | None, progress: Progress, stop: StopRequest) -> int:
    """Train from `start_step` to the end or until a stop is asked for; the number of steps done in all."""
    step = start_step
    save_every = t.config.checkpoint_every or t.loader.steps_per_epoch
    saved = start_step
    alarmed = False
    batches = t.loader.batches(start_step, t.total_steps)
    while step < t.total_steps:
        began = time.perf_counter()
        batch = next_batch(t, batches, stop, patient=step == start_step)
        if batch is None:
            break
        fetched = time.perf_counter()
        output, lr, gradient_norm = training_step(t, batch)
        step = batch.step + 1
        values: dict[str, float] = {}
        if step % t.config.log_every == 0 or step == t.total_steps:
            values = {**_measure(t, batch, output), "lr": lr, "gradient_norm": gradient_norm}
            now = collapsed(values, min(t.config.batch_size - 1, output.features.shape[1]))
            if now and not alarmed:
                _say(progress, f"warning: step {step}: {COLLAPSE_ADVICE}")
            alarmed = now
        progress.update(t.config.batch_size, fetched - began, time.perf_counter() - fetched, shown(values))
        if values and metrics is not None:
            timing = {"images_per_second": progress.rate, "data_wait_share": progress.wait_share}
            metrics.write(step, step / t.loader.steps_per_epoch, {**values, "collapsed": alarmed}, timing=timing)
        if step % t.loader.steps_per_epoch == 0:
            _report_epoch(t, progress, step // t.loader.steps_per_epoch)
        if step % save_every == 0:
            _save(t, step, metrics)
            saved = step
    del batches  # ends the workers before the last checkpoint is written
    if saved != step:
        _save(t, step, metrics)
    return step


def _save(t: Training, step: int, metrics: MetricsLog | None) -> None:
    """A checkpoint, after the lines of metrics it presupposes are safely on disk."""
    if metrics is not None:
        metrics.sync()
    t.save(step)


def next_batch(t: Training, batches: Iterator[Batch], stop: StopRequest, *, patient: bool = False) -> Batch | None:
    """The next batch, or None where a stop was asked for, on this process or another: all leave after the same step.

    What one process cannot read is made known to all, and an error of one is an error of all: none is left waiting.
    `patient`: the first batch may take longer than any other, with shards still to be fetched.
    """
    if t.fabric.world_size == 1:
        return None if stop.requested is not None else next(batches, None)
    batch, error = None, None
    try:
        batch = next(batches, None)
    except Exception as caught:
        error = caught
    if patient:
        meet()
    if batch is not None:
        t.reached(batch.step)
    unshared = t.loader.unshared()
    said = torch.tensor([int(stop.requested or 0), int(error is not None), len(unshared)], device=t.fabric.device)
    asked, failed, news = t.fabric.all_reduce(said, reduce_op="max").tolist()
    if failed:
        fail_together(error)
    if news:
        t.loader.share(gather_objects(unshared))
    if asked:
        stop.request(asked)
        return None
    return batch


def training_step(t: Training, batch: Batch) -> tuple[StepOutput, float, float]:
    """One step: learning rate, loss, gradient, check, update, momentum and queue."""
    lr = learning_rate(t.config, batch.step, t.loader.steps_per_epoch)
    for group in t.optimizer.param_groups:
        group["lr"] = lr
    # Dropout and drop-path draw from the global generator: seeded by the step, it has no state to carry or to save.
    torch.manual_seed(t.config.seed * 1_000_003 + batch.step)
    output = t.method(batch.views, batch.ids, epoch=batch.epoch, labels=batch.labels)
    t.fabric.backward(output.loss)
    gradient_norm = _clip(t)
    _refuse_nonfinite(t, batch, output.loss, gradient_norm)
    t.optimizer.step()
    t.optimizer.zero_grad(set_to_none=True)
    t.core.finish_step(batch.step, t.total_steps)
    return output, lr, gradient_norm


def learning_rate(config: PretrainConfig, step: int, steps_per_epoch: int) -> float:
    """Warm-up and cosine, as a pure function of the step."""
    return warmup_cosine(
        step,
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
        peak=scaled_lr(config.lr, config.batch_size),
    )


def shown(values: dict[str, float]) -> dict[str, str]:
    """The few values that stand beside the progress bar."""
    names = {
        "loss": ("loss", "{:.3f}"),
        "spread": ("spread", "{:.2f}"),
        "effective_rank": ("rank", "{:.0f}"),
        "same_class": ("right neighbours", "{:.0%}"),
        "queue_knn": ("queue kNN", "{:.0%}"),
    }
    return {title: form.format(values[name]) for name, (title, form) in names.items() if name in values}


def _clip(t: Training) -> float:
    """The gradient's norm over all parameters (unscaled in half precision), clipped where the config says so."""
    limit = float("inf") if t.config.clip_gradient is None else t.config.clip_gradient
    return float(t.fabric.clip_gradients(t.method, t.optimizer, max_norm=limit, error_if_nonfinite=False))


def _refuse_nonfinite(t: Training, batch: Batch, loss: Tensor, gradient_norm: float) -> None:
    """Stop before the update where loss or gradient is not finite, and write down which images it was.

    The gradient is the mean over all processes, so all see it; a loss is each one's own, so they tell each other. In
    half precision a gradient may overflow now and then: there the loss scaler skips the step.
    """
    value = float(loss.detach())
    bad_losses = sum_over_processes(torch.tensor([float(not math.isfinite(value))], device=loss.device)).item()
    if not bad_losses and (t.config.precision == "16" or gradient_norm < float("inf")):
        return
    told = gather_objects((str(value), batch.ids.tolist()))
    # Where a loss is not finite, the images are those of its process; a gradient alone may come from any.
    guilty = [entry for entry in told if not bad_losses or not math.isfinite(float(entry[0]))]
    ranks = [told.index(entry) for entry in guilty]
    if t.fabric.is_global_zero:
        record = {
            "step": batch.step,
            "loss": guilty[0][0],
            "gradient_norm": str(gradient_norm),
            "processes": ranks,
            "ids": [image for _, ids in guilty for image in ids],
        }
        write_atomic(t.run.nonfinite, json.dumps(record) + "\n")
    barrier()
    where = f" on process {ranks[0]}" if t.fabric.world_size > 1 and bad_losses else ""
    raise UserError(
        f"step {batch.step}: the {'loss' if bad_losses else 'gradient'} is not finite{where}; nothing was updated. The"
        f" images are listed in {t.run.nonfinite}. The last checkpoint is intact: start another run from its weights"
        " (--init-from) or from scratch, with a lower --lr, --clip-gradient 1 or --precision 32."
    )


def _measure(t: Training, batch: Batch, output: StepOutput) -> dict[str, float]:
    """Loss and health of the whole batch: what one process would have measured, however many share it."""
    loss = sum_over_processes(output.loss.detach().clone()) / t.fabric.world_size
    rest = {name: part for name, part in output._asdict().items() if name != "loss" and part is not None}
    whole = StepOutput(loss=loss, **{name: gather(part) for name, part in rest.items()})
    values = {"loss": float(loss), **health(whole, t.label_of_id, gather(batch.ids))}
    return values if t.core.queue is None else {**values, "queue_fill": len(t.core.queue) / t.core.queue.length}


def _report_epoch(t: Training, progress: Progress, epoch: int) -> None:
    """About twenty lines over a run, and every epoch in the log file."""
    facts = ", ".join(f"{title} {value}" for title, value in progress.values.items())
    line = f"epoch {epoch}/{t.config.epochs}: {facts or 'no values yet (see --log-every)'}"
    _log.info(line)
    if epoch % -(-t.config.epochs // 20) == 0:
        progress.say(line)


def _say(progress: Progress, text: str) -> None:
    progress.say(text)
    _log.warning(text)
