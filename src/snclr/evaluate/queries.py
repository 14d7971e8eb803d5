"""The image a person asks about, and whether it is itself in the collection that is searched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snclr.data.folder import open_folder
from snclr.data.sources import FileSource, Source, open_source
from snclr.data.splits import Subset
from snclr.errors import UserError
from snclr.evaluate.neighbors import class_names
from snclr.train.run_folder import RunFolder


def open_queries(text: str | Path, collection: Source | None) -> Source:
    """One image file, all images of a folder, or an image of the collection by its key (e.g. demo/train/12)."""
    path = Path(text).expanduser()
    if path.is_dir():
        return open_folder(path, name=str(text), split="all")
    if path.is_file():
        return FileSource(str(text), path.parent, [path.name])
    index = None if collection is None else index_of(collection, str(text))
    if collection is None or index is None:
        where = "" if collection is None else f", and no image of {collection.name} is called that"
        raise UserError(f"there is no file or folder {text}{where}; give an image file or a folder of images")
    return Subset(collection, np.array([index], dtype=np.int64))


def training_images(run: str | Path, data: str) -> tuple[Source | None, str | None]:
    """The images a run was trained on, or None and why: the queue's entries then have numbers, but no names."""
    try:
        source = open_source(data, split="train")
    except UserError as error:
        return None, f"the run's images are not at hand, so neighbours are shown by number alone: {error}"
    if _fingerprint_of(run) not in (None, source.fingerprint()):
        return None, f"the images of {data} have changed since the run, so neighbours are shown by number alone"
    return source, None


def _fingerprint_of(run: str | Path) -> str | None:
    """The fingerprint of the data in the run's newest readable checkpoint."""
    for folder in sorted(RunFolder(run).checkpoints.glob("step-*"), reverse=True):
        try:
            found = json.loads((folder / "info.json").read_bytes()).get("data")
        except (OSError, ValueError, AttributeError):
            continue
        return found if isinstance(found, str) else None
    return None


def index_of(source: Source, key: str) -> int | None:
    """The index of an image by what people are shown for it, or None."""
    return next((index for index in range(len(source)) if source.key(index) == key), None)


def file_of(source: Source, index: int) -> Path | None:
    """The file of an image, or None where it is not in a file of its own."""
    if isinstance(source, Subset):
        return file_of(source.source, int(source.index[index]))
    return source.folder / source.files[index] if isinstance(source, FileSource) else None


def same_images(queries: Source, collection: Source) -> tuple[Tensor, Tensor]:
    """Numbers for the queries (n,) and the collection (m,) that are equal for the very same image, and only then.

    Files are the same by the file system's word, whatever their names: a link to an image is that image.
    """
    if is_same_set(queries, collection):
        return torch.arange(len(queries)), torch.arange(len(collection))
    if isinstance(queries, Subset) and is_same_set(queries.source, collection):
        return torch.from_numpy(queries.index), torch.arange(len(collection))
    ours = torch.full((len(queries),), -1)
    theirs = torch.full((len(collection),), -2)
    number: dict[tuple[int, int], int] = {}
    for index in range(len(queries)):
        identity = _identity(file_of(queries, index))
        if identity is not None:
            ours[index] = number.setdefault(identity, len(number))
    if number:
        for index in range(len(collection)):
            identity = _identity(file_of(collection, index))
            if identity is not None:
                theirs[index] = number.get(identity, -2)
    return ours, theirs


def is_same_set(one: Source, other: Source) -> bool:
    """Whether two sources are the very same images in the same order, opened once or twice.

    A folder's fingerprint is of its names alone, so that a moved data set is the same one: here two folders that both
    have a 0.png are two sets.
    """
    if one is other:
        return True
    if isinstance(one, FileSource) and isinstance(other, FileSource):
        here, there = _identity(one.folder), _identity(other.folder)
        return here is not None and here == there and one.fingerprint() == other.fingerprint()
    if isinstance(one, Subset) and isinstance(other, Subset):
        return np.array_equal(one.index, other.index) and is_same_set(one.source, other.source)
    return type(one) is type(other) and one.fingerprint() == other.fingerprint()


def query_labels(queries: Source, collection: Source, ours: Tensor, theirs: Tensor) -> list[str | None]:
    """Class name of each query: its own, or the one the same image has in the collection (see `same_images`)."""
    own = class_names(queries, torch.arange(len(queries))) or [None] * len(queries)
    names = class_names(collection, torch.arange(len(collection)))
    if names is None:
        return own
    known = {number: names[index] for index, number in enumerate(theirs.tolist())}
    return [label or known.get(number) for label, number in zip(own, ours.tolist(), strict=True)]


def _identity(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
