"""Write scikit-learn's handwritten digits (1,797 gray images of 8 × 8 pixels) as a folder that snclr reads.

    pip install scikit-learn
    python scripts/write_digits.py digits

The first 898 images are in train/, the last 899 in test/, in the order of the dataset.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN = 898


def write(folder: Path) -> None:
    """Write one PNG per image to train/ and test/, in a folder per digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("train" if number < TRAIN else "test") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.round(values * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
        Image.fromarray(pixels).save(place / f"{number:04d}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/write_digits.py FOLDER")
    write(Path(sys.argv[1]))
