"""Milliseconds of a step of a recipe by part: data, color, encoder, loss, optimizer; and the gain of --compile."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from snclr.diagnostics.recipe_step import milliseconds, random_batch, recipe_task
from snclr.diagnostics.results import CheckRow, measured, not_applicable, verdict
from snclr.diagnostics.setup import Setup
from snclr.train.pretrain_task import PretrainTask

COMPILE_ERROR = 0.1
"""Largest relative difference of a compiled step's loss: fused kernels round half precision differently."""


def check_speed(setup: Setup) -> Iterator[CheckRow]:
    """Measure the parts of a step of the recipe and the whole step, on one rank."""
    task = recipe_task(setup)
    images, repeats = task.config.batch_size, 2 if setup.quick else 5
    parts = step_parts(task)
    times = {name: milliseconds(run, setup.device, repeats=repeats) for name, run in parts.items()}
    note = {"data": " on one core", "loss": " (search, loss and gradient)"}
    for name, value in times.items():
        text = f"{value:.1f} ms for {images} images{note.get(name, '')}"
        yield measured("speed", f"{setup.recipe}: {name}", text, value)
    rate = 1000 * images / times["step"]
    share = times["encoder"] / times["step"]
    text = f"{rate:,.0f} images/s, {share:.0%} of it in the encoder"
    yield measured("speed", f"{setup.recipe}: rate", text, rate)


def step_parts(task: PretrainTask) -> dict[str, Callable[[], Any]]:
    """Return the parts of a step as functions to time, and the whole step as "step"."""
    method, config = task.module, task.config
    batch = random_batch(task, config.batch_size)
    crops = task.loader._stage1[0]
    update = getattr(task.optimizer, "optimizer", task.optimizer).step  # without the loss scale, which has no gradients
    autocast = task.fabric.strategy.precision.forward_context

    def encoder() -> None:
        with torch.no_grad(), autocast():
            for view in batch.views[:2]:
                method.momentum_encoder(view)
        for view in batch.views[:2]:
            with autocast():
                features = method.encoder(view)
            features.float().sum().backward()
        task.optimizer.zero_grad(set_to_none=True)

    y = torch.randn(config.batch_size, config.dim, device=task.fabric.device)
    z = torch.randn_like(y).requires_grad_()

    def loss() -> None:
        for _ in range(2):
            method.criterion(y, z, y, batch.ids).loss.backward()

    def optimizer() -> None:
        for parameter in method.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        update()

    return {
        "data": lambda: task.loader._stage1[0],
        "color": lambda: task.loader._finish(crops),
        "encoder": encoder,
        "loss": loss,
        "optimizer": optimizer,
        "step": lambda: task.training_step(batch),
    }


def check_compile(setup: Setup) -> Iterator[CheckRow]:
    """Compare a step of the recipe with and without --compile: its loss must be the same."""
    if setup.quick:
        yield not_applicable("compile", setup.recipe, "not run with --quick")
        return
    if setup.kind == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        yield not_applicable("compile", setup.recipe, "torch.compile needs a C++ compiler, and there is none")
        return
    found = {}
    for compiled in (False, True):
        task = recipe_task(setup, compile=compiled)
        batch = random_batch(task, task.config.batch_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            batch.views = tuple(torch.randn(view.shape).to(view) for view in batch.views)
        loss = float(task.training_step(batch)[0].loss.detach())
        time = milliseconds(functools.partial(task.training_step, batch), setup.device, repeats=3)
        found[compiled] = (loss, time)
    (plain_loss, plain_time), (loss, time) = found[False], found[True]
    error = abs(loss - plain_loss) / max(abs(plain_loss), 1e-12)
    yield verdict(
        "compile", setup.recipe, error <= COMPILE_ERROR,
        value=f"{plain_time / time:.2f} × as fast ({plain_time:.0f} → {time:.0f} ms), loss differs by {error:.1e}",
        limit=f"loss differs by ≤ {COMPILE_ERROR:g}", number=plain_time / time, advice="Train without --compile.",
    )  # fmt: skip
