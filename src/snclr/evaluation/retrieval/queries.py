"""Query images by file, folder or key; without torch, so that a typo is reported before it is imported."""

from pathlib import Path

import numpy as np

from snclr.data.datasets.base import FileDataset, ImageDataset
from snclr.data.datasets.folder import open_folder
from snclr.data.decode import BadImage, RGBImage
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


def load_query(text: str | Path, query: ImageDataset, min_side: int | None = None) -> RGBImage:
    """Decode the image of a dataset of one that was opened by `text`, or raise UserError."""
    try:
        return query.load(0, min_side=min_side)
    except BadImage as error:
        raise UserError(f"{text} cannot be read: {error}; give another image") from error
