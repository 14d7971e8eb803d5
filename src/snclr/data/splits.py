"""Training and test splits for evaluation, subsets, and which images of two datasets are the same."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset, Labels, open_dataset
from snclr.data.datasets.builtin import BUILTIN
from snclr.data.datasets.folder import split_folder
from snclr.data.datasets.huggingface import has_test_split, names_huggingface
from snclr.data.decode import RGBImage
from snclr.data.sampler import Ids, epoch_order
from snclr.data.validation_split import VALIDATION, VALIDATION_SHARE, split_part
from snclr.errors import UserError
from snclr.io.hashing import sha256_text

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT = 0.2


@dataclass
class Subset(ImageDataset):
    """A subset of a dataset, with its keys."""

    dataset: ImageDataset
    index: Ids = field(repr=False)

    def __post_init__(self) -> None:
        self.name = self.dataset.name
        self.classes = self.dataset.classes
        self.remote = self.dataset.remote
        self.labels: Labels | None = None if self.dataset.labels is None else self.dataset.labels[self.index]

    def __len__(self) -> int:
        return len(self.index)

    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Return one image, uint8 (H, W, 3)."""
        return self.dataset.load(int(self.index[index]), min_side)

    def key(self, index: int) -> str:
        """Return the key in the dataset."""
        return self.dataset.key(int(self.index[index]))

    def file(self, index: int) -> Path | None:
        """Return the file in the dataset."""
        return self.dataset.file(int(self.index[index]))

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """Return the dataset's own order restricted to the subset, or the default order."""
        if type(self.dataset).epoch_order is ImageDataset.epoch_order:
            return super().epoch_order(seed, epoch)
        position = np.full(len(self.dataset), -1, dtype=np.int64)
        position[self.index] = np.arange(len(self))
        chosen: Ids = position[self.dataset.epoch_order(seed, epoch)]
        return chosen[chosen >= 0]

    def fingerprint(self) -> str:
        """Hash the fingerprint of the dataset and the indices."""
        return sha256_text(self.dataset.fingerprint() + self.index.tobytes().hex())


def take(dataset: ImageDataset, index: Ids) -> ImageDataset:
    """Return a subset; that of images in memory is in memory too, with keys counted from 0."""
    if isinstance(dataset, ArrayDataset):
        labels = None if dataset.labels is None else dataset.labels[index]
        return ArrayDataset(dataset.name, dataset.images[index], labels, dataset.classes, prefix=dataset.prefix)
    return Subset(dataset, index)


def sample_ids(n: int, count: int, seed: int = 0) -> Ids:
    """Return a seeded sample of at most `count` of n positions, ascending.

    >>> sample_ids(3, 5).tolist(), len(sample_ids(100, 5))
    ([0, 1, 2], 5)
    """
    return np.arange(n) if n <= count else np.sort(epoch_order(n, seed, epoch=0)[:count])


def sample(dataset: ImageDataset, count: int, seed: int = 0) -> ImageDataset:
    """Return the images of `sample_ids` of a dataset, with their keys."""
    return dataset if len(dataset) <= count else Subset(dataset, sample_ids(len(dataset), count, seed))


def hold_out(labels: Labels, share: float, seed: int) -> tuple[Ids, Ids]:
    """Split (n,) labeled images into two sorted index arrays, the second with `share` of each class (at least one).

    >>> kept, held = hold_out(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0)
    >>> len(kept), len(held)
    (6, 2)
    """
    generator = np.random.default_rng([seed, len(labels)])
    held = [
        generator.permutation(np.flatnonzero(labels == label))[: max(1, round(share * np.sum(labels == label)))]
        for label in np.unique(labels[labels >= 0])
        if np.sum(labels == label) > 1
    ]
    second = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    first = np.setdiff1d(np.flatnonzero(labels >= 0), second)
    return first, second


def open_part(data: str, *, root: Path | None = None, download: bool = False) -> ImageDataset:
    """Open the validation part of a training split, a fixed tenth of each class, or the other images."""
    name, part = split_part(data)
    whole = open_dataset(name, split="train", root=root, download=download)
    if whole.labels is None:
        raise UserError(f"{name} has no labels, so no validation images can be held out. Use one folder per class.")
    _, held = hold_out(whole.labels, VALIDATION_SHARE, seed=0)
    return take(whole, held if part == VALIDATION else np.setdiff1d(np.arange(len(whole)), held))


def open_splits(data: str, test: str | None = None, *, seed: int = 0) -> tuple[ImageDataset, ImageDataset, str]:
    """Return the training split, the test split, and a description of both.

    `test` names a separate test set. Otherwise the test split of the dataset is used, or a fifth of each class, held
    out by the seed.
    """
    if test is not None:
        return _open(data, "train"), _open(test, "test"), f"train {data}, test {test}"
    if has_own_test_split(data):
        return _open(data, "train"), _open(data, "test"), f"{data}, its own train and test split"
    whole = _open(data, "train")
    if whole.labels is None:
        return whole, whole, data  # the evaluation reports the missing labels
    kept, held = hold_out(whole.labels, HELD_OUT, seed)
    if len(kept) and not len(held):
        raise UserError(
            f"no class of {data} has two images, so none can be held out; give a separate test set with --test"
        )
    description = f"{data}, {HELD_OUT:.0%} of each class held out for the test (seed {seed})"
    return take(whole, kept), take(whole, held), description


def holds_out_test(data: str, test: str | None) -> bool:
    """Return whether `open_splits` holds out test images because there are no separate ones."""
    return test is None and not has_own_test_split(data)


def has_own_test_split(data: str) -> bool:
    """Return whether a dataset has its own test split."""
    data = split_part(data)[0]
    if names_huggingface(data):
        return has_test_split(data)
    if data.lower() in BUILTIN:
        return "test" in BUILTIN[data.lower()]["splits"]
    folder = Path(data).expanduser()
    return data.lower() == "demo" or split_folder(folder, "test") != folder


def _open(data: str, split: str) -> ImageDataset:
    """Open a split, or all of a dataset without splits."""
    return open_dataset(data, split=split if has_own_test_split(data) else "train", download=True)


def same_images(queries: ImageDataset, gallery: ImageDataset) -> tuple[Tensor, Tensor]:
    """Return ids of the queries (n,) and of the gallery (m,) that are equal exactly for the same image.

    Files are compared by device and inode: a link to an image is the same image, a copy is not.
    """
    import torch  # only here: commands check their arguments with this module before they import torch

    (query_source, query_index), (gallery_source, gallery_index) = source_of(queries), source_of(gallery)
    if is_same_dataset(query_source, gallery_source):
        return torch.from_numpy(query_index), torch.from_numpy(gallery_index)
    query_inodes = [_inode(queries.file(index)) for index in range(len(queries))]
    numbers: dict[object, int] = {inode: number for number, inode in enumerate(query_inodes) if inode is not None}
    # Without inodes of the queries, e.g. in memory, no file of the gallery is looked up.
    gallery_inodes = [_inode(gallery.file(index)) if numbers else None for index in range(len(gallery))]
    query_ids = torch.tensor([numbers.get(inode, -1) for inode in query_inodes])
    return query_ids, torch.tensor([numbers.get(inode, -2) for inode in gallery_inodes])


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
    if isinstance(one, FileDataset) and isinstance(other, FileDataset) and _inode(one.folder) != _inode(other.folder):
        return False
    return type(one) is type(other) and one.fingerprint() == other.fingerprint()


def _inode(path: Path | None) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        if path is not None:
            status = os.stat(path)
            return status.st_dev, status.st_ino
    return None
