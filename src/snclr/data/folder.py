"""A folder of images at any depth, and a text list of image files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from snclr.data.decode import SUFFIXES
from snclr.data.folder_index import list_images
from snclr.data.shard_index import sort_classes
from snclr.data.sources import FileSource, Labels
from snclr.errors import UserError

# The sub-folder that holds each split when a folder is laid out as train/ beside val/ or test/.
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "test"), "test": ("test", "val")}


def open_folder(folder: Path, *, name: str, split: str = "train") -> FileSource:
    """Open all images below a folder, sorted by name; the first-level folders are the labels where there are several.

    With `train/` beside `val/` or `test/` in it, `split` picks one of them, and `all` takes everything as it lies. Any
    other folder has no splits: all of it is taken for whichever is asked.
    """
    chosen = split_folder(folder, split)
    files = list_images(chosen)
    if not files:
        raise UserError(
            f"no images found in {chosen}; files ending in {' '.join(SUFFIXES)} are looked for at any depth "
            "(hidden ones are not)"
        )
    tops = [file.partition("/")[0] if "/" in file else None for file in files]
    names = {top for top in tops if top is not None}
    if chosen != folder:
        # Both splits number the classes alike, even where one split lacks a class.
        names |= {path.name for path in (folder / "train").iterdir() if path.is_dir() and path.name[0] != "."}
    if len(names) < 2:  # one folder tells nothing apart
        return FileSource(name, chosen, files)
    classes = sorted(names)
    place = {top: number for number, top in enumerate(classes)}
    labels = np.array([-1 if top is None else place[top] for top in tops], dtype=np.int64)
    return FileSource(name, chosen, files, labels, classes)


def open_list(path: Path, *, name: str) -> FileSource:
    """Open the images named in a text file: a path a line, or a path, a TAB and a label; `#` starts a comment line.

    Paths are relative to the list's own folder. Missing files are an error, at once rather than in mid-run.
    """
    if path.suffix.lower() in SUFFIXES:
        raise UserError(f"{name} is a single image; give a folder of images or a text list of them")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{name} cannot be read as a text list of image paths: {error}") from error
    rows: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        row = [part.strip() for part in line.split("\t")]
        if len(row) > 2 or not row[0]:
            raise UserError(f"{name}, line {number}: expected a path, or a path, one TAB and a label; got {line!r}")
        rows.append(row)
    files = [row[0] for row in rows]
    if not files:
        raise UserError(f"{name} names no images; each line is a path, or a path, a TAB and a label")
    missing = [file for file in files if not os.path.isfile(path.parent / file)]
    if missing:
        raise UserError(
            f"{name} names {len(missing)} files that do not exist, e.g. {', '.join(missing[:3])}; paths are relative "
            f"to {path.parent}, and a label follows after a TAB"
        )
    labels, classes = number_labels([row[1] if len(row) == 2 and row[1] else None for row in rows])
    return FileSource(name, path.parent, files, labels, classes)


def split_folder(folder: Path, split: str) -> Path:
    """The sub-folder that holds a split, where a folder has train/ beside val/ or test/; else the folder itself."""
    if split == "all":
        return folder
    if split not in _SPLIT_FOLDERS:
        raise UserError(f"unknown split {split!r}; a folder has train, val, test or all")
    if (folder / "train").is_dir() and ((folder / "val").is_dir() or (folder / "test").is_dir()):
        return next(folder / sub for sub in _SPLIT_FOLDERS[split] if (folder / sub).is_dir())
    return folder


def number_labels(names: Sequence[str | None]) -> tuple[Labels | None, list[str] | None]:
    """Number label names by their sorted order (as numbers when all are); a missing label is -1."""
    known = {name for name in names if name is not None}
    if not known:
        return None, None
    classes = sort_classes(known)
    place = {name: number for number, name in enumerate(classes)}
    return np.array([-1 if name is None else place[name] for name in names], dtype=np.int64), classes
