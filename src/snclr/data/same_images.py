"""Which images of two datasets are the same: of one dataset and its subsets by index, otherwise files by inode."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snclr.data.datasets.base import FileDataset, ImageDataset
from snclr.data.sampler import Ids
from snclr.data.splits import Subset


def same_images(queries: ImageDataset, gallery: ImageDataset) -> tuple[Tensor, Tensor]:
    """Return ids of the queries (n,) and of the gallery (m,) that are equal exactly for the same image.

    Files are compared by device and inode: a link to an image is the same image, a copy is not.
    """
    (query_source, query_index), (gallery_source, gallery_index) = source_of(queries), source_of(gallery)
    if is_same_dataset(query_source, gallery_source):
        return torch.from_numpy(query_index), torch.from_numpy(gallery_index)
    query_inodes = [_inode(queries.file(index)) for index in range(len(queries))]
    numbers = {inode: number for number, inode in enumerate(query_inodes) if inode is not None}
    query_ids = torch.tensor([-1 if inode is None else numbers[inode] for inode in query_inodes])
    gallery_ids = torch.full((len(gallery),), -2)
    for index in range(len(gallery) if numbers else 0):
        inode = _inode(gallery.file(index))
        if inode is not None:
            gallery_ids[index] = numbers.get(inode, -2)
    return query_ids, gallery_ids


def source_of(dataset: ImageDataset) -> tuple[ImageDataset, Ids]:
    """Return the dataset that a subset was taken from, and the index (n,) of each image in it."""
    index = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        index = dataset.index[index]
        dataset = dataset.dataset
    return dataset, index


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
    return type(one) is type(other) and one.fingerprint() == other.fingerprint()


def _inode(path: Path | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)
