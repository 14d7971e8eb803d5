"""What every check gets: device, ranks and recipe; and the tiny runs that the checks train."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from snclr.data.loader import Batch
from snclr.methods.config import METHODS
from snclr.train.build import build_task
from snclr.train.config import PretrainConfig, resolve, settings_for_method
from snclr.train.pretrain import launch_run
from snclr.train.pretrain_task import PretrainTask

TINY: dict[str, Any] = {
    "data": "demo", "out": "unused", "recipe": "demo", "encoder": "resnet10-tiny", "image_size": 32, "batch_size": 32,
    "hidden": 64, "dim": 32, "neighbors": 5, "queue_length": 256, "prototypes": 32, "momentum": 0.9, "workers": 0,
    "optimizer": "sgd", "lr": 0.4, "warmup_epochs": 0, "clip_gradient": 1.0, "threads": 0,
}  # fmt: skip
"""A run of milliseconds per step. SGD and clipping make the update a bounded multiple of the gradient."""
STEPS = 3
"""Steps of a tiny run: from the second on, the queue has neighbors."""


@dataclass(frozen=True)
class Setup:
    """Options of `snclr doctor`, and a temporary folder."""

    device: str
    """A torch device: cuda, cuda:1, mps or cpu."""
    ranks: int
    """Ranks of the check of several ranks."""
    recipe: str
    """Recipe of the checks of memory and speed."""
    quick: bool
    folder: Path

    @property
    def kind(self) -> str:
        """Device type: cuda, mps or cpu."""
        return self.device.partition(":")[0]


def tiny_config(method: str = "snclr", **settings: Any) -> PretrainConfig:
    """Return the config of a tiny run of a method."""
    vit = {"encoder": "test_vit", "stem": "auto"} if METHODS[method].masks_patches else {}
    return resolve(settings_for_method(method, {**TINY, **vit, "method": method, **settings}))


def open_task(config: PretrainConfig) -> PretrainTask:
    """Build the task of a config on one rank."""
    return build_task(config, launch_run(config))


@functools.cache
def tiny_batches(method: str, image_size: int) -> tuple[Batch, ...]:
    """Return the first batches of a tiny run on the CPU, for all devices and precisions alike."""
    loader = open_task(tiny_config(method, image_size=image_size, device="cpu")).loader
    return tuple(loader.batches(0, STEPS))


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on a device."""
    labels = None if batch.labels is None else batch.labels.to(device)
    views = tuple(view.to(device) for view in batch.views)
    return Batch(batch.ids.to(device), views, labels, batch.epoch, batch.step)


def synchronize(device: str) -> None:
    """Wait until the device has done all its work."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products and convolutions without TF32, which rounds their inputs to 10 bits."""
    backends: Any = torch.backends
    new_names = hasattr(backends.cudnn, "conv")  # torch 2.9 and later, which refuse a mix of both kinds of names
    owners = (backends.cuda.matmul, backends.cudnn.conv if new_names else backends.cudnn)
    name, exact = ("fp32_precision", "ieee") if new_names else ("allow_tf32", False)
    before = [getattr(owner, name) for owner in owners]
    for owner in owners:
        setattr(owner, name, exact)
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            setattr(owner, name, value)


def write_photos(folder: Path, count: int = 32) -> Path:
    """Write smooth random JPEG files of 500 × 375 pixels, as in ImageNet, and return their folder."""
    target = folder / f"photos-{count}"
    if target.is_dir():
        return target
    target.mkdir()
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(target / f"{number:03}.jpg")
    return target
