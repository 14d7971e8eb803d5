"""Query images: how they are opened, and whether a gallery contains the very same image."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import FileDataset, ImageDataset, open_dataset
from snclr.data.datasets.folder import open_folder
from snclr.data.splits import Subset
from snclr.errors import UserError


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
    raise UserError(f"there is no file or folder {text}{names}. Give an image file or a folder of images")


def training_images(run: str | Path, data: str) -> tuple[ImageDataset | None, str | None]:
    """Open the images a run was trained on; None and the reason if they are missing or have changed."""
    try:
        dataset = open_dataset(data, split="train")
    except UserError as error:
        return None, f"the run's images are not available, so neighbors are named by number: {error}"
    if _trained_fingerprint(run) not in (None, dataset.fingerprint()):
        return None, f"the images of {data} have changed since training, so neighbors are named by number"
    return dataset, None


def _trained_fingerprint(run: str | Path) -> str | None:
    """Return the dataset fingerprint in the run's newest readable checkpoint."""
    for checkpoint in sorted(RunDir(run).checkpoints.glob("step-*"), reverse=True):
        try:
            fingerprint = json.loads((checkpoint / "info.json").read_bytes()).get("data")
        except (OSError, ValueError, AttributeError):
            continue
        return fingerprint if isinstance(fingerprint, str) else None
    return None


def label_of(dataset: ImageDataset, index: int) -> str | None:
    """Return the class name of an image (the class number if classes are unnamed), or None if unknown."""
    label = -1 if dataset.labels is None else int(dataset.labels[index])
    return None if label < 0 else str(label) if dataset.classes is None else dataset.classes[label]


def class_names(dataset: ImageDataset, ids: Tensor) -> list[str | None] | None:
    """Return the class name of each image; None for a dataset without labels."""
    return None if dataset.labels is None else [label_of(dataset, index) for index in ids.tolist()]


def file_of(dataset: ImageDataset, index: int) -> Path | None:
    """Return the file of an image, or None if it does not have a file of its own."""
    if isinstance(dataset, Subset):
        return file_of(dataset.dataset, int(dataset.index[index]))
    return dataset.folder / dataset.files[index] if isinstance(dataset, FileDataset) else None


def same_images(queries: ImageDataset, gallery: ImageDataset) -> tuple[Tensor, Tensor]:
    """Number the queries (n,) and the gallery (m,) so that numbers are equal exactly for the same image.

    Files are compared by device and inode: a link to an image is the same image, a copy is not.
    """
    if is_same_dataset(queries, gallery):
        return torch.arange(len(queries)), torch.arange(len(gallery))
    if isinstance(queries, Subset) and is_same_dataset(queries.dataset, gallery):
        return torch.from_numpy(queries.index), torch.arange(len(gallery))
    query_ids = torch.full((len(queries),), -1)
    gallery_ids = torch.full((len(gallery),), -2)
    numbers: dict[tuple[int, int], int] = {}
    for index in range(len(queries)):
        inode = _inode(file_of(queries, index))
        if inode is not None:
            query_ids[index] = numbers.setdefault(inode, len(numbers))
    for index in range(len(gallery) if numbers else 0):
        inode = _inode(file_of(gallery, index))
        if inode is not None:
            gallery_ids[index] = numbers.get(inode, -2)
    return query_ids, gallery_ids


def is_same_dataset(one: ImageDataset, other: ImageDataset) -> bool:
    """Return whether two datasets hold the same images in the same order.

    The fingerprint of a folder covers file names only, so folders are also compared by inode: two folders that both
    have a 0.png are different datasets.
    """
    if one is other:
        return True
    if isinstance(one, FileDataset) and isinstance(other, FileDataset):
        inode = _inode(one.folder)
        return inode is not None and inode == _inode(other.folder) and one.fingerprint() == other.fingerprint()
    if isinstance(one, Subset) and isinstance(other, Subset):
        return np.array_equal(one.index, other.index) and is_same_dataset(one.dataset, other.dataset)
    return type(one) is type(other) and one.fingerprint() == other.fingerprint()


def _inode(path: Path | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)
