"""Folders of images at any depth, and text lists of image files."""

from __future__ import annotations

import os
from pathlib import Path

from snclr.data.datasets.base import FileDataset
from snclr.data.datasets.folder_index import list_images
from snclr.data.decode import SUFFIXES
from snclr.data.labels import encode_labels, number_labels
from snclr.errors import UserError

# Subfolders of each split in a folder with train/ and val/ or test/.
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "test"), "test": ("test", "val")}


def open_folder(folder: Path, *, name: str, split: str = "train") -> FileDataset:
    """Open all images below a folder, sorted by name; first-level subfolders are the classes if there are several.

    In a folder with `train/` and `val/` or `test/`, `split` selects one of them, and `all` ignores the splits. Other
    folders have no splits, and every `split` gives all of it.
    """
    chosen = split_folder(folder, split)
    files = list_images(chosen)
    if not files:
        raise UserError(
            f"no images found in {chosen}. Files with the suffixes {' '.join(SUFFIXES)} are found at any depth; hidden "
            "ones are ignored."
        )
    tops = [file.partition("/")[0] if "/" in file else None for file in files]
    names = {top for top in tops if top is not None}
    if chosen != folder:
        # All splits number the classes alike, even if one lacks a class.
        names |= {path.name for path in (folder / "train").iterdir() if path.is_dir() and path.name[0] != "."}
    if len(names) < 2:
        return FileDataset(name, chosen, files)
    classes = sorted(names)
    return FileDataset(name, chosen, files, encode_labels(tops, classes), classes)


def open_list(path: Path, *, name: str) -> FileDataset:
    """Open the images listed in a text file: one path per line, with an optional TAB and label; `#` starts a comment.

    Paths are relative to the folder of the list. Missing files are an error.
    """
    if path.suffix.lower() in SUFFIXES:
        raise UserError(f"{name} is a single image; give a folder of images or a text list of them")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{name} cannot be read as a text list of image paths: {error}") from error
    files: list[str] = []
    names: list[str | None] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        file, *label = (part.strip() for part in line.split("\t"))
        if len(label) > 1 or not file:
            raise UserError(f"{name}, line {number}: expected a path, or a path, one TAB and a label; got {line!r}")
        files.append(file)
        names.append((label[0] or None) if label else None)
    if not files:
        raise UserError(f"{name} lists no images; each line is a path, or a path, a TAB and a label")
    missing = [file for file in files if not os.path.isfile(path.parent / file)]
    if missing:
        raise UserError(
            f"{name} lists {len(missing)} files that do not exist, e.g. {', '.join(missing[:3])}. Paths are relative "
            f"to {path.parent}, and a label is separated by a TAB."
        )
    labels, classes = number_labels(names)
    return FileDataset(name, path.parent, files, labels, classes)


def split_folder(folder: Path, split: str) -> Path:
    """Return the subfolder of a split if there are train/ and val/ or test/; else the folder itself."""
    if split == "all":
        return folder
    if split not in _SPLIT_FOLDERS:
        raise UserError(f"unknown split {split!r}; a folder has train, val, test or all")
    if (folder / "train").is_dir() and ((folder / "val").is_dir() or (folder / "test").is_dir()):
        return next(folder / sub for sub in _SPLIT_FOLDERS[split] if (folder / sub).is_dir())
    return folder
