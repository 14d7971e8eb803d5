"""`demo`: a subset of CIFAR-10 included in the package (see demo_images/ORIGIN.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ArrayDataset
from snclr.data.decode import RGBImage, decode
from snclr.errors import UserError

FOLDER = Path(__file__).parent / "demo_images"
SIDE = 32


def open_demo(split: str = "train") -> ArrayDataset:
    """Open the demo images, `train` or `test`, as uint8 (n, 32, 32, 3) with labels; classes alternate.

    >>> open_demo("test").images.shape
    (1200, 32, 32, 3)
    """
    if split not in ("train", "test"):
        raise UserError(f"the demo data has the splits train and test, not {split!r}")
    sheets: dict[str, list[RGBImage]] = {}
    for path in sorted(FOLDER.glob(f"{split}-*-*.webp")):
        sheets.setdefault(path.stem.split("-")[1], []).append(_cut(decode(path)))
    if not sheets:
        raise UserError(
            f"this installation has no demo images in {FOLDER}. Build them in a checkout of the project with `python "
            "scripts/build_demo_data.py`, or use your own folder of images."
        )
    by_class = np.stack([np.concatenate(parts) for parts in sheets.values()], axis=1)  # (n, classes, 32, 32, 3)
    images = by_class.reshape(-1, SIDE, SIDE, 3)
    labels = np.tile(np.arange(len(sheets), dtype=np.int64), len(by_class))
    return ArrayDataset("demo", images, labels, list(sheets), prefix=f"demo/{split}")


def _cut(sheet: RGBImage) -> RGBImage:
    """Cut a sheet (rows * 32, columns * 32, 3) into its images (n, 32, 32, 3), row by row."""
    rows, columns = sheet.shape[0] // SIDE, sheet.shape[1] // SIDE
    grid = sheet.reshape(rows, SIDE, columns, SIDE, 3)
    images: RGBImage = grid.transpose(0, 2, 1, 3, 4).reshape(-1, SIDE, SIDE, 3)
    return images
