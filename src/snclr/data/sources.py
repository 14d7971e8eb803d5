"""Sets of images, all alike to the rest of the program, and `open_source`, which finds one from what a person typed.

A further kind of source is a class with these members and one more line in `open_source`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from snclr.data.decode import Picture, decode
from snclr.data.order import Ids
from snclr.errors import UserError

Labels = npt.NDArray[np.int64]


class Source(Protocol):
    """A finite, indexable set of images; an image's index is its id everywhere."""

    name: str
    labels: Labels | None
    classes: list[str] | None

    def __len__(self) -> int: ...

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Return one image, uint8 (H, W, 3) RGB; raises BadImage. See `decode` for `min_side`."""
        ...

    def key(self, index: int) -> str:
        """Return what people are shown for one image, e.g. its file name."""
        ...

    def fingerprint(self) -> str:
        """Return a hex digest that changes when the data set does."""
        ...


@runtime_checkable
class OrderedSource(Protocol):
    """A source that is not read in any order with equal ease, and so has an epoch's order of its own."""

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """Return a permutation (n,), a pure function of the seed and the epoch."""
        ...


def order_of(source: Source) -> Callable[[int, int], Ids] | None:
    """The source's own order of an epoch, as a function of seed and epoch; None: the order of all others."""
    return source.epoch_order if isinstance(source, OrderedSource) else None


def is_remote(source: Source) -> bool:
    """Whether to read an image may mean to wait for a network."""
    return bool(getattr(source, "remote", False))


@dataclass
class ArraySource:
    """Equal-size images in memory: `images` uint8 (n, H, W, 3), `labels` int64 (n,) or None."""

    name: str
    images: Picture
    labels: Labels | None = None
    classes: list[str] | None = None
    prefix: str = ""
    """Goes before the index in `key`; the name when empty."""

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise UserError(
                f"images must be uint8 of shape (n, height, width, 3); got {self.images.dtype} {self.images.shape}"
            )
        _check_labels(self.labels, len(self.images))

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Return one image, uint8 (H, W, 3); `min_side` is not needed here."""
        image: Picture = self.images[index]
        return image

    def key(self, index: int) -> str:
        """Return e.g. `demo/train/12`."""
        return f"{self.prefix or self.name}/{index}"

    def fingerprint(self) -> str:
        """Digest the shape and a sample of the images (all of them would take seconds for a large set)."""
        sample = np.linspace(0, len(self) - 1, num=min(len(self), 1000)).astype(np.int64)
        content = hashlib.sha256(np.ascontiguousarray(self.images[sample]).tobytes()).hexdigest()
        return _digest([self.prefix or self.name, str(self.images.shape), content])


@dataclass
class FileSource:
    """Image files, by their names below one folder (or absolute names)."""

    name: str
    folder: Path
    files: Sequence[str] = field(repr=False)
    labels: Labels | None = field(default=None, repr=False)
    classes: list[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.files))

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Decode one file, uint8 (H, W, 3) RGB; raises BadImage."""
        return decode(self.folder / self.files[index], min_side)

    def key(self, index: int) -> str:
        """Return the file's name below the folder; bytes that are no text are shown as escapes."""
        return self.files[index].encode("utf-8", "backslashreplace").decode()

    def fingerprint(self) -> str:
        """Digest the list of names, not the folder's own place: a moved data set is the same one."""
        return _digest(self.files)


def open_source(spec: str | Path, *, split: str = "train", root: Path | None = None, download: bool = False) -> Source:
    """Open a folder, a text list, shards, a Hugging Face data set (`hf:…`), a torchvision data set by name, or `demo`.

    `split` picks a part where the set has parts. `root` is where torchvision's sets lie; they are downloaded only with
    `download=True`; what an address or `hf:` names is fetched when it is read. A name wins over a folder of the same
    name: write `./demo` for the folder.

    >>> open_source("demo").classes
    ['airplane', 'automobile', 'frog', 'horse', 'ship']
    """
    # Imported here: these modules build on this one.
    from snclr.data.builtin import BUILTIN, open_builtin
    from snclr.data.demo import open_demo
    from snclr.data.folder import open_folder, open_list, split_folder
    from snclr.data.huggingface import names_huggingface, open_huggingface
    from snclr.data.shard_names import is_shard_folder, names_shards
    from snclr.data.shards import open_shards

    text = str(spec)
    name = text.lower() if isinstance(spec, str) else ""
    if name == "demo":
        return open_demo(split)
    if name in BUILTIN:
        return open_builtin(name, split=split, root=root, download=download)
    if names_huggingface(text):
        return open_huggingface(text, split=split)
    path = Path(spec).expanduser()
    if path.is_dir():
        part = split_folder(path, split)
        return open_shards(part, name=text) if is_shard_folder(part) else open_folder(path, name=text, split=split)
    if names_shards(text):
        return open_shards(text, name=text)
    if path.is_file():
        return open_list(path, name=text)
    raise UserError(_unknown(text, ["demo", *BUILTIN]))


def align_labels(source: Source, classes: Sequence[str]) -> Labels:
    """Return a source's labels numbered by another list of class names (n,); -1 where a class is not in it.

    Two lists or folders opened apart may number their classes differently: compare by name, never by number.
    """
    if source.labels is None or source.classes is None:
        return np.full(len(source), -1, dtype=np.int64)
    place = {name: number for number, name in enumerate(classes)}
    table = np.array([place.get(name, -1) for name in source.classes] + [-1], dtype=np.int64)  # last: label -1
    aligned: Labels = table[source.labels]
    return aligned


def _unknown(text: str, names: list[str]) -> str:
    close = difflib.get_close_matches(text.lower(), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"no data set found for {text!r}.{hint} Give a folder of images, a text file with one image path a line, "
        "shards (shards/{000..146}.tar, or their address), a Hugging Face data set (hf:OWNER/NAME), "
        f"or one of these names: {', '.join(names)}."
    )


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _check_labels(labels: Labels | None, length: int) -> None:
    if labels is not None and (labels.dtype != np.int64 or labels.shape != (length,)):
        raise UserError(f"labels must be int64 of shape ({length},); got {labels.dtype} {labels.shape}")
