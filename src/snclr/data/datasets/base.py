"""The base class of datasets, datasets in memory and of files, and `open_dataset`.

To add a kind of dataset, write a subclass of `ImageDataset` and add a line to `open_dataset`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from snclr.data.decode import RGBImage, decode
from snclr.data.labels import Labels as Labels
from snclr.data.sampler import Ids, epoch_order
from snclr.data.validation_split import split_part
from snclr.errors import UserError, did_you_mean, similar_path
from snclr.io.hashing import sha256_bytes, sha256_text


class ImageDataset(ABC):
    """A map-style dataset of images; the index of an image is its id."""

    name: str
    labels: Labels | None
    classes: list[str] | None
    remote: bool = False
    """Whether reading an image may wait for the network."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Return one image, uint8 (H, W, 3) RGB; raises BadImage. See `decode` for `min_side`."""

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the name that identifies an image in messages and on the command line, e.g. its file name."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hex digest that changes when the dataset does."""

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """Return the permutation (n,) of one epoch; a dataset with expensive random access has its own."""
        return epoch_order(len(self), seed, epoch)

    def file(self, index: int) -> Path | None:
        """Return the file of an image, or None if it does not have a file of its own."""
        return None

    def class_name(self, index: int) -> str | None:
        """Return the class name of an image (the class number if classes are unnamed), or None if unknown."""
        label = -1 if self.labels is None else int(self.labels[index])
        return None if label < 0 else self.classes[label] if self.classes else str(label)

    def class_names(self) -> list[str]:
        """Return the names of the classes, or their numbers if they are unnamed."""
        largest = -1 if self.labels is None else int(self.labels.max(initial=-1))
        return self.classes or [str(number) for number in range(largest + 1)]


@dataclass
class ArrayDataset(ImageDataset):
    """Equal-size images in memory: `images` uint8 (n, H, W, 3), `labels` int64 (n,) or None."""

    name: str
    images: RGBImage
    labels: Labels | None = None
    classes: list[str] | None = None
    prefix: str = ""
    """Prefix of keys; empty: the name."""

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Return one image, uint8 (H, W, 3); `min_side` has no effect."""
        return self.images[index]

    def key(self, index: int) -> str:
        """Return e.g. `demo/train/12`."""
        return f"{self.prefix or self.name}/{index}"

    def fingerprint(self) -> str:
        """Hash the shape and a sample of the images; hashing all of them would take seconds."""
        sample = np.linspace(0, len(self) - 1, num=min(len(self), 1000)).astype(np.int64)
        content = sha256_bytes(np.ascontiguousarray(self.images[sample]).tobytes())
        return _digest([self.prefix or self.name, str(self.images.shape), content])


@dataclass
class FileDataset(ImageDataset):
    """Image files, by names relative to a folder, or absolute."""

    name: str
    folder: Path
    files: Sequence[str] = field(repr=False)
    labels: Labels | None = field(default=None, repr=False)
    classes: list[str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Decode one file, uint8 (H, W, 3) RGB; raises BadImage."""
        return decode(self.file(index), min_side)

    def file(self, index: int) -> Path:
        """Return the path of an image."""
        return self.folder / self.files[index]

    def key(self, index: int) -> str:
        """Return the relative file name; bytes that are not UTF-8 are escaped."""
        return self.files[index].encode("utf-8", "backslashreplace").decode()

    def fingerprint(self) -> str:
        """Hash the list of names but not the folder, so that a dataset can be moved."""
        return _digest(self.files)


def open_dataset(
    spec: str | Path, *, split: str = "train", root: Path | None = None, download: bool = False
) -> ImageDataset:
    """Open a folder, a text list, shards, a Hugging Face dataset (`hf:…`), a torchvision dataset by name, or `demo`.

    `split` selects a split if there are several. torchvision datasets are read from `root`, and downloaded only with
    `download=True`; URLs and `hf:` are always downloaded. A name takes precedence over a folder of the same name: write
    `./demo` for the folder. `SPEC#fit` and `SPEC#validation` are the training split without its validation images, and
    these images alone (`splits.open_part`).

    >>> open_dataset("demo").classes
    ['airplane', 'automobile', 'frog', 'horse', 'ship']
    """
    # Imported here because these modules import this one.
    from snclr.data.datasets.builtin import BUILTIN, open_builtin, open_demo
    from snclr.data.datasets.folder import open_folder, open_list, split_folder
    from snclr.data.datasets.huggingface import names_huggingface, open_huggingface
    from snclr.data.shards.open import is_shard_folder, names_shards, open_shards
    from snclr.data.splits import open_part

    text, part = split_part(str(spec))
    if part and split == "train":
        return open_part(str(spec), root=root, download=download)
    name = text.lower() if isinstance(spec, str) else ""
    if name == "demo":
        return open_demo(split)
    if name in BUILTIN:
        return open_builtin(name, split=split, root=root, download=download)
    if names_huggingface(text):
        return open_huggingface(text, split=split)
    path = Path(text).expanduser()
    if path.is_dir():
        subfolder = split_folder(path, split)
        if is_shard_folder(subfolder):
            return open_shards(subfolder, name=text)
        return open_folder(path, name=text, split=split)
    if names_shards(text):
        return open_shards(text, name=text)
    if path.is_file():
        return open_list(path, name=text)
    raise _not_found(text)


def check_spec(spec: str | Path) -> None:
    """Raise UserError if nothing of that name exists; the images themselves are not listed or read."""
    from snclr.data.datasets.builtin import BUILTIN
    from snclr.data.datasets.huggingface import names_huggingface
    from snclr.data.shards.open import names_shards

    text, _ = split_part(str(spec))
    known = text.lower() in ("demo", *BUILTIN) or names_huggingface(text) or names_shards(text)
    if not (known or Path(text).expanduser().exists()):
        raise _not_found(text)


def _not_found(text: str) -> UserError:
    """Return the error for data of which nothing is found, with the closest path or name."""
    from snclr.data.datasets.builtin import BUILTIN

    names = ["demo", *BUILTIN]
    hint = similar_path(Path(text).expanduser()) or did_you_mean(text.lower(), names)
    return UserError(
        f"no dataset found for {text!r}{hint}. Give a folder of images, a text file with one "
        "image path per line, shards (shards/{000..146}.tar, or a URL), a Hugging Face dataset (hf:OWNER/NAME), or "
        f"one of these names: {', '.join(names)}."
    )


def _digest(parts: Iterable[str]) -> str:
    return sha256_text("".join(f"{part}\0" for part in parts))
