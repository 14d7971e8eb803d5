"""Datasets by name: `demo`, a subset of CIFAR-10 in the package (see demo_images/ORIGIN.md), and torchvision's."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.cache import user_cache
from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset
from snclr.data.decode import RGBImage, decode
from snclr.errors import UserError

BUILTIN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""torchvision's datasets by name: the class, and its arguments for each split."""
DEMO_FOLDER = Path(__file__).parent / "demo_images"
_SIDE = 32


def open_demo(split: str = "train") -> ArrayDataset:
    """Open the demo images, `train` or `test`, as uint8 (n, 32, 32, 3) with labels; classes alternate.

    >>> open_demo("test").images.shape
    (1200, 32, 32, 3)
    """
    if split not in ("train", "test"):
        raise UserError(f"the demo data has the splits train and test, not {split!r}")
    classes: dict[str, list[RGBImage]] = {}
    for path in sorted(DEMO_FOLDER.glob(f"{split}-*-*.webp")):
        classes.setdefault(path.stem.split("-")[1], []).append(_cut(decode(path)))
    if not classes:
        raise UserError(
            f"this installation has no demo images in {DEMO_FOLDER}. Build them in a checkout of the project with "
            "`python scripts/build_demo_data.py`, or use your own folder of images."
        )
    images = np.stack([np.concatenate(sheets) for sheets in classes.values()], axis=1)  # (n, classes, 32, 32, 3)
    labels = np.tile(np.arange(len(classes), dtype=np.int64), len(images))
    return ArrayDataset("demo", images.reshape(-1, _SIDE, _SIDE, 3), labels, list(classes), prefix=f"demo/{split}")


def _cut(sheet: RGBImage) -> RGBImage:
    """Cut a sheet (rows * 32, columns * 32, 3) into its images (n, 32, 32, 3), row by row."""
    grid = sheet.reshape(sheet.shape[0] // _SIDE, _SIDE, sheet.shape[1] // _SIDE, _SIDE, 3)
    return grid.swapaxes(1, 2).reshape(-1, _SIDE, _SIDE, 3)


def open_builtin(name: str, *, split: str = "train", root: Path | None = None, download: bool = False) -> ImageDataset:
    """Open a torchvision dataset in `root` (default: `snclr/data` in the user's cache folder).

    Datasets that torchvision holds in memory become an ArrayDataset, others a FileDataset.
    """
    entry = BUILTIN[name]
    if split not in entry["splits"]:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(entry['splits'])}")
    downloads = entry.get("downloads", True)
    root = user_cache() / "data" if root is None else Path(root).expanduser()
    import torchvision.datasets

    arguments = entry["splits"][split] | ({"download": download} if downloads else {})
    try:
        dataset = getattr(torchvision.datasets, entry["class"])(root=str(root), **arguments)
    except ImportError as error:
        raise UserError(f"{name} needs another package: {error}; install it with pip") from error
    except (OSError, RuntimeError) as error:
        advice = "download it or give its location (download=True, root=…)"
        if not downloads:
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
    if not (labels >= 0).any():  # unlabeled images are marked -1
        return ArrayDataset(name, rgb, prefix=f"{name}/{split}")
    return ArrayDataset(name, rgb, labels, _classes(dataset, labels), prefix=f"{name}/{split}")


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
