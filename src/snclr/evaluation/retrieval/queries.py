"""Query images by file, folder or key; without torch, so that a typo is reported before it is imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from snclr.data.datasets.base import FileDataset, ImageDataset
from snclr.data.datasets.folder import open_folder
from snclr.data.splits import Subset
from snclr.errors import UserError, similar_path


def open_queries(text: str | Path, *datasets: ImageDataset | None) -> ImageDataset:
    """Open an image file, a folder of images, or one image of the datasets by its key (e.g. demo/train/12)."""
    path = Path(text).expanduser()
    if path.is_dir():
        return open_folder(path, name=str(text), split="all")
    if path.is_file():
        return FileDataset(str(text), path.parent, [path.name])
    searched = [dataset for dataset in datasets if dataset is not None]
    for dataset in searched:
        index = next((i for i in range(len(dataset)) if dataset.key(i) == str(text)), None)
        if index is not None:
            return Subset(dataset, np.array([index], dtype=np.int64))
    names = f", and {searched[0].name} has no image with that key" if searched else ""
    hint = similar_path(path)
    raise UserError(f"there is no file or folder {text}{hint}{names}. Give an image file or a folder of images")


def check_single(image: str | Path) -> None:
    """Raise UserError for a folder where one image is needed."""
    if Path(image).expanduser().is_dir():
        raise UserError(f"{image} is a folder; give one image")
