"""Images of random pixels in class folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_noise(
    folder: Path, count: int, *, size: tuple[int, int] = (16, 16), classes: Sequence[str] = ("class0", "class1"),
    digits: int = 1,
) -> Path:  # fmt: skip
    """Write `count` images of `size` (height, width), number i of at least `digits` digits to folder i of `classes`."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / classes[number % len(classes)] / f"{number:0{digits}}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(path)
    return folder
