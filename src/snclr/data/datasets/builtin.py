"""torchvision datasets by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.cache import user_cache
from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset
from snclr.data.decode import RGBImage
from snclr.errors import UserError


@dataclass(frozen=True)
class Builtin:
    """A torchvision class, and its arguments for each split."""

    type: str
    splits: Mapping[str, Mapping[str, object]]
    downloads: bool = True


_TRAIN_FLAG = {"train": {"train": True}, "test": {"train": False}}


def _splits(**names: str) -> dict[str, dict[str, object]]:
    return {split: {"split": name} for split, name in names.items()}


BUILTIN: dict[str, Builtin] = {
    "cifar10": Builtin("CIFAR10", _TRAIN_FLAG),
    "cifar100": Builtin("CIFAR100", _TRAIN_FLAG),
    "mnist": Builtin("MNIST", _TRAIN_FLAG),
    "fashionmnist": Builtin("FashionMNIST", _TRAIN_FLAG),
    "kmnist": Builtin("KMNIST", _TRAIN_FLAG),
    "svhn": Builtin("SVHN", _splits(train="train", test="test", extra="extra")),
    "stl10": Builtin(
        "STL10",
        {**_splits(train="train", test="test", unlabeled="unlabeled"), "train+unlabeled": {"split": "train+unlabeled"}},
    ),
    "dtd": Builtin("DTD", _splits(train="train", val="val", test="test")),
    "eurosat": Builtin("EuroSAT", {"train": {}}),
    "fgvcaircraft": Builtin("FGVCAircraft", _splits(train="trainval", test="test")),
    "flowers102": Builtin("Flowers102", _splits(train="train", val="val", test="test")),
    "food101": Builtin("Food101", _splits(train="train", test="test")),
    "gtsrb": Builtin("GTSRB", _splits(train="train", test="test")),
    "imagenet": Builtin("ImageNet", _splits(train="train", val="val", test="val"), downloads=False),
    "imagenette": Builtin("Imagenette", _splits(train="train", val="val", test="val")),
    "oxfordiiitpet": Builtin("OxfordIIITPet", _splits(train="trainval", test="test")),
}


def open_builtin(name: str, *, split: str = "train", root: Path | None = None, download: bool = False) -> ImageDataset:
    """Open a torchvision dataset in `root` (default: `snclr/data` in the user's cache folder).

    Datasets that torchvision holds in memory become an ArrayDataset, others a FileDataset.
    """
    entry = BUILTIN[name]
    if split not in entry.splits:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(entry.splits)}")
    root = user_cache() / "data" if root is None else Path(root).expanduser()
    import torchvision.datasets

    arguments = {**entry.splits[split], **({"download": download} if entry.downloads else {})}
    try:
        dataset = getattr(torchvision.datasets, entry.type)(root=str(root), **arguments)
    except ImportError as error:
        raise UserError(f"{name} needs another package: {error}; install it with pip") from error
    except (OSError, RuntimeError) as error:
        advice = "download it or give its location (download=True, root=…)"
        if not entry.downloads:
            advice = "it cannot be downloaded automatically; get it from its publisher and give its folder"
        elif download:
            advice = "check the connection and the free disk space"
        raise UserError(
            f"{name} ({split}) cannot be opened in {root}; {advice}. The error of torchvision: {error}"
        ) from error
    return _from_arrays(name, split, dataset) if hasattr(dataset, "data") else _from_files(name, root, dataset)


def _from_arrays(name: str, split: str, dataset: Any) -> ArrayDataset:
    images = np.asarray(dataset.data)
    if images.ndim == 3:  # gray (n, H, W)
        images = images[..., None]
    elif images.shape[-1] != 3:  # channels first (n, 3, H, W)
        images = images.transpose(0, 2, 3, 1)
    rgb: RGBImage = np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)), dtype=np.uint8)
    labels = np.asarray(dataset.labels if hasattr(dataset, "labels") else dataset.targets).astype(np.int64)
    labeled = bool((labels >= 0).any())  # unlabeled images are marked -1
    prefix = f"{name}/{split}"
    classes = _classes(dataset, labels)
    return ArrayDataset(name, rgb, labels if labeled else None, classes if labeled else None, prefix=prefix)


def _from_files(name: str, root: Path, dataset: Any) -> FileDataset:
    # torchvision has no common attribute for the file names.
    pairs = getattr(dataset, "samples", None) or getattr(dataset, "_samples", None)
    if pairs is None:
        files = getattr(dataset, "_image_files", None) or dataset._images
        pairs = list(zip(files, dataset._labels, strict=True))
    labels = np.array([label for _, label in pairs], dtype=np.int64)
    # with "/" on every system, so that fingerprints are equal
    names = [Path(os.path.relpath(file, root)).as_posix() for file, _ in pairs]
    return FileDataset(name, root, names, labels, _classes(dataset, labels))


def _classes(dataset: Any, labels: np.ndarray[Any, Any]) -> list[str]:
    """Return the class names (the first if a class has several), or numbers if there are none."""
    names = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)
    return [str(name[0] if isinstance(name, tuple) else name) for name in names]
