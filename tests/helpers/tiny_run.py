"""A small trained run and the images it was trained on, for the tests of the commands that use a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from snclr.train.config import settings_for_method
from snclr.train.pretrain import pretrain

COLORS = {"blue": (30, 40, 210), "green": (30, 200, 40), "red": (220, 40, 30)}


def write_images(folder: Path, each: int = 16, *, size: int = 20, seed: int = 0) -> Path:
    """Noisy images in a folder for each color, and one file that is no image."""
    generator = np.random.default_rng(seed)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            noise = generator.integers(-60, 60, (size, size, 3))
            pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}_{number}.png")
    (folder / "red" / "broken.png").write_bytes(b"no image at all")
    return folder


def train(images: Path, out: Path, **settings: object) -> Path:
    """A run of two epochs, complete, in a second."""
    small: dict[str, object] = {
        "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 16, "epochs": 2, "warmup_epochs": 1,
        "hidden": 32, "dim": 16, "neighbors": 5, "queue_length": 40, "views": "cifar", "lr": 0.05, "workers": 0,
        "device": "cpu", "min_agreement": 0.0,  # neighbors from the first step
    }  # fmt: skip
    small = settings_for_method(str(settings.get("method", "snclr")), small)
    result = pretrain(data=str(images), out=str(out), **{"quiet": True, **small, **settings})
    assert result.step == result.total_steps
    return out
