"""Photographs for code that prepares an image, and the features that the evaluations give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from snclr.data.decode import decode
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import MEAN, STD


def write_photos(folder: Path) -> list[str]:
    """Write a landscape photo, one with an EXIF rotation, and one smaller than any encoder's input."""
    generator = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, (height, width) in {"wide.png": (150, 230), "rotated.png": (131, 200), "small.png": (20, 28)}.items():
        pixels = Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((width, height))
        pixels.save(folder / name, exif=exif if name == "rotated.png" else b"")
    return ["wide.png", "rotated.png", "small.png"]


@torch.no_grad()
def as_evaluated(encoder: Any, spec: Any, path: Path) -> torch.Tensor:
    """Return the features (1, D) of an image's center crop."""
    pixels = torch.from_numpy(center_crop(decode(path), spec.image_size).copy()).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    features: torch.Tensor = encoder((pixels - mean) / std)
    return features
