"""What every check gets and returns: device, ranks and recipe, rows; and the tiny runs that the checks train."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from snclr.data.loader import Batch
from snclr.methods.config import METHODS
from snclr.runtime.device import math_settings
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
TINY_STEPS = 3
"""Steps of a tiny run: from the second on, the queue has neighbors."""


@dataclass(frozen=True)
class CheckRow:
    """One check: what was measured, the limit, and what to do if it fails."""

    name: str
    outcome: Literal["passed", "failed", "measured", "not applicable"]
    """Without a limit: measured. If the check cannot run on this machine or with these flags: not applicable."""
    value: str
    """The measured value with its unit; for "not applicable", the reason."""
    _: KW_ONLY
    limit: str = ""
    """What the value must be; empty for a row that is only measured."""
    advice: str = ""
    """What to do if the check fails."""
    number: float | None = None
    """The measured value as a number."""
    details: tuple[str, ...] = ()
    """More lines, e.g. the tensors that differ; the command line prints them for a failed row only."""
    group: str = ""
    """The group of checks, set when the group has run."""

    @classmethod
    def at_most(cls, name: str, number: float, limit: float, *, advice: str, details: tuple[str, ...] = ()) -> CheckRow:
        """Return a row that passes if `number` is at most `limit`; a number that is not finite fails.

        >>> CheckRow.at_most("top-k", 2e-7, 1e-6, advice="").outcome
        'passed'
        """
        value, bound = f"{number:.2g}", f"≤ {limit:.2g}"
        return cls.verdict(name, number <= limit, value, bound, advice=advice, number=number, details=details)

    @classmethod
    def verdict(cls, name: str, passed: bool, value: str, limit: str, *, advice: str, **more: Any) -> CheckRow:
        """Return a row that passed or failed."""
        return cls(name, "passed" if passed else "failed", value, limit=limit, advice=advice, **more)


@dataclass(frozen=True)
class Setup:
    """Options of `snclr doctor` and the folder for its files."""

    device: str
    """A torch device: cuda, cuda:1, mps or cpu."""
    ranks: int
    """Ranks of a run on this machine: those of the check "ranks", and of the shared memory that is needed."""
    recipe: str
    """Recipe whose memory and speed are measured."""
    quick: bool
    """Whether sizes are smaller and the slowest measurements are omitted."""
    folder: Path
    """Temporary folder, deleted after the checks."""

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
    return tuple(loader.batches(0, TINY_STEPS))


def exact_float32(device: torch.device | str) -> AbstractContextManager[None]:
    """Compute float32 products and convolutions in the block without TF32, which rounds their inputs to 10 bits."""
    return math_settings(device, tf32=False, deterministic=False)


def write_photos(folder: Path, count: int = 32) -> Path:
    """Write smooth random JPEG files of 500 × 375 pixels, as in ImageNet, and return their folder."""
    target = folder / f"photos-{count}"
    target.mkdir(exist_ok=True)
    for number in range(len(list(target.iterdir())), count):
        coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(target / f"{number:03}.jpg")
    return target
