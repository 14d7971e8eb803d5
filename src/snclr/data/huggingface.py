"""Hugging Face data sets: `hf:OWNER/NAME`, read by index; `hf-stream:OWNER/NAME`, streamed once into shards on disk.

Images are taken as the bytes they are and decoded by us, as carefully as any file. Data sets that come as a program are
refused by the library itself from version 4 on, and older ones are not used.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.decode import BadImage, Picture, decode, decode_stream
from snclr.data.folder import number_labels
from snclr.data.sources import Labels, Source
from snclr.errors import UserError

# The names of a split, in the order in which they are looked for.
_SPLITS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation", "val", "valid", "dev"),
}
_OPTIONS = ("image", "label", "revision", "data_files", "data_dir", "limit")
# Builders of the library that unpickle files, run queries or programs.
_REFUSED = ("pandas", "sql", "spark", "generator", "cache")
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")
_SAMPLE = 256


@dataclass(frozen=True)
class Spec:
    """What was typed: `hf:NAME[@CONFIG][:SPLIT][?image=COLUMN&label=COLUMN&revision=…&data_files=…&data_dir=…]`."""

    name: str
    config: str | None = None
    split: str | None = None
    stream: bool = False
    options: dict[str, str] = field(default_factory=dict)


def names_huggingface(text: str) -> bool:
    """Whether what a person typed means a Hugging Face data set; `hf://` is an address of a file there."""
    return text.startswith(("hf:", "hf-stream:")) and not text.startswith("hf://")


def parse_spec(text: str) -> Spec:
    """Take a specification apart.

    >>> parse_spec("hf:ylecun/mnist@mnist:test?image=image")
    Spec(name='ylecun/mnist', config='mnist', split='test', stream=False, options={'image': 'image'})
    """
    kind, _, rest = text.partition(":")
    place, _, query = rest.partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    unknown = [name for name, value in pairs if name not in _OPTIONS or not value]
    split, config = None, None
    if match := re.fullmatch(r"(.+):([^/:\[\]]+(?:\[[^\[\]]*\])?)", place):
        place, split = match[1], match[2]
    if match := re.fullmatch(r"(.+)@([^/@]+)", place):
        place, config = match[1], match[2]
    if not place or unknown:
        said = f"unknown or empty options {', '.join(unknown)}" if unknown else "there is no name"
        raise UserError(
            f"{text!r}: {said}; write hf:OWNER/NAME[@CONFIG][:SPLIT][?OPTION=VALUE&…] with the options "
            f"{', '.join(_OPTIONS)}, or hf-stream: in place of hf:"
        )
    return Spec(place, config, split, kind == "hf-stream", dict(pairs))


class HuggingFaceSource:
    """A map-style data set of the library `datasets`, with images by index. Its tables are files, mapped by workers."""

    def __init__(self, dataset: Any, *, name: str, image: str | None = None, label: str | None = None) -> None:
        columns = find_columns(dataset.features, name, image=image, label=label)
        if not len(dataset):
            raise UserError(f"{name} has no images in it")
        self.name = name
        self.labels, self.classes = _labels(dataset, columns[1])
        self._column = columns[0]
        self._rows = undecoded(dataset, columns[0]).select_columns([columns[0]])

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Decode one image, uint8 (H, W, 3) RGB; raises BadImage."""
        data, path = self._cell(index)
        if data is not None:
            return decode_stream(io.BytesIO(data), min_side)
        if path is not None:
            return decode(path, min_side)
        raise BadImage("there is no image in this row")

    def key(self, index: int) -> str:
        """The row, with the file's name where the data set keeps it."""
        path = self._cell(index)[1]
        return f"{self.name}/{index}" + (f"/{Path(path).name}" if path else "")

    def fingerprint(self) -> str:
        """A digest of the number of images, the labels, and the bytes of a sample of the images."""
        digest = hashlib.sha256(f"{len(self)}\0{self.classes}".encode())
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), _SAMPLE)).astype(np.int64).tolist():
            data, path = self._cell(index)
            digest.update(hashlib.sha256(data or b"").digest() + Path(path or "").name.encode())
        return digest.hexdigest()

    def _cell(self, index: int) -> tuple[bytes | None, str | None]:
        return image_cell(self._rows[index][self._column])


def image_cell(value: Any) -> tuple[bytes | None, str | None]:
    """The bytes and the path of an undecoded image; either may be missing."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    return (bytes(value) if isinstance(value, (bytes, bytearray)) else None), None


def open_huggingface(text: str, *, split: str = "train") -> Source:
    """Open what `hf:…` or `hf-stream:…` names; a split in the name wins over `split`."""
    spec = parse_spec(text)
    if spec.stream:
        from snclr.data.hf_stream import open_stream

        return open_stream(text, spec, split)
    if "limit" in spec.options:
        raise UserError(f"{text!r}: limit is for streams (hf-stream:); give a split such as :train[:1000] instead")
    dataset = load(text, spec, split, streaming=False)
    return HuggingFaceSource(dataset, name=text, image=spec.options.get("image"), label=spec.options.get("label"))


def has_test_split(text: str) -> bool:
    """Whether the data set has a part of its own for testing, beside one to train on."""
    spec = parse_spec(text)
    if spec.split is not None:
        return False
    names = _split_names(text, spec)
    return any(name in names for name in _SPLITS["train"]) and any(name in names for name in _SPLITS["test"])


def load(text: str, spec: Spec, split: str, *, streaming: bool) -> Any:
    """The data set of one split, by the library; UserError where it cannot be had."""
    datasets = _library(text)
    chosen = spec.split or _pick(_split_names(text, spec), split, text)
    if _saved(spec.name):
        found = _take_split(_saved_splits(text, spec), chosen, text)
        return found.to_iterable_dataset() if streaming else found
    return _explained(
        text, lambda: datasets.load_dataset(spec.name, spec.config, split=chosen, streaming=streaming, **_where(spec))
    )


def find_columns(features: Any, name: str, *, image: str | None, label: str | None) -> tuple[str, str | None]:
    """The columns with the images and with the labels (None: there is none), from the types of the columns."""
    datasets = _library(name)
    if features is None:
        raise UserError(f"{name} does not say what its columns are; use another format of it, such as parquet")
    for column in (image, label):
        if column is not None and column not in features:
            raise UserError(f"{name} has no column {column!r}; it has {', '.join(features)}")
    if image is None:
        images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
        images = images or [c for c, kind in features.items() if c.lower() in _IMAGE_NAMES and _holds_bytes(kind)]
        preferred = [column for column in images if column.lower() in _IMAGE_NAMES]
        if len(images) != 1 and len(preferred) != 1:
            said = f"several columns of images ({', '.join(images)})" if images else "no column of images"
            raise UserError(f"{name} has {said}; add ?image=COLUMN with one of {', '.join(features)}")
        image = images[0] if len(images) == 1 else preferred[0]
    if label is None:
        classes = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        preferred = [column for column in _LABEL_NAMES if column in classes]
        label = preferred[0] if preferred else classes[0] if len(classes) == 1 else None
    return image, label


def undecoded(dataset: Any, column: str) -> Any:
    """The data set with its images as the bytes they are: the library's own decoder would open any format."""
    datasets = _library(column)
    if isinstance(dataset.features[column], datasets.Image):
        return dataset.cast_column(column, datasets.Image(decode=False))
    return dataset


def label_texts(values: Sequence[Any], kind: Any) -> list[str | None]:
    """Labels as names; None where one is missing or -1."""
    names = getattr(kind, "names", None)
    return [
        None if value is None or value == -1 else str(names[value]) if names is not None else str(value)
        for value in values
    ]


def _labels(dataset: Any, column: str | None) -> tuple[Labels | None, list[str] | None]:
    if column is None:
        return None, None
    values = list(dataset[column])
    kind = dataset.features[column]
    names = getattr(kind, "names", None)
    if names is None:
        return number_labels(label_texts(values, kind))
    labels = np.array([-1 if value is None else int(value) for value in values], dtype=np.int64)
    return (labels, list(names)) if (labels >= 0).any() else (None, None)


def _library(text: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(f"{text}: Hugging Face data sets need a package: pip install 'snclr[huggingface]'") from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise UserError(
            f"{text}: the package datasets is of version {datasets.__version__}, which may run a data set's own "
            "program; pip install 'datasets>=4'"
        )
    return datasets


def _split_names(text: str, spec: Spec) -> list[str]:
    datasets = _library(text)
    if _saved(spec.name):
        return list(_saved_splits(text, spec))
    names: list[str] = _explained(
        text, lambda: datasets.get_dataset_split_names(spec.name, spec.config, **_where(spec))
    )
    return names


def _pick(names: Sequence[str], split: str, text: str) -> str:
    found = next((name for name in _SPLITS.get(split, (split,)) if name in names), None)
    if found is None and split == "train" and len(names) == 1:
        return names[0]
    if found is None:
        raise UserError(f"{text} has no split {split!r}; it has {', '.join(names)}. Name one: {text}:{names[0]}")
    return found


def _where(spec: Spec) -> dict[str, str]:
    return {name: spec.options[name] for name in ("revision", "data_files", "data_dir") if name in spec.options}


def _saved(name: str) -> bool:
    """Whether it is a folder that the library's `save_to_disk` made."""
    folder = Path(name)
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved_splits(text: str, spec: Spec) -> dict[str, Any]:
    """The splits of a saved folder by name; a set without splits is the one it was saved from, or else train."""
    datasets = _library(text)
    found = _explained(text, lambda: datasets.load_from_disk(spec.name))
    if isinstance(found, dict):
        return dict(found)
    said = re.fullmatch(r"(\w+)(\[.*\])?", str(found.split or ""))
    return {said[1] if said else "train": found}


def _take_split(splits: dict[str, Any], chosen: str, text: str) -> Any:
    """One split or a part of it, by the library's own reading of `train[:100]` and `train[10%:]`."""
    datasets = _library(text)
    try:
        instruction = datasets.ReadInstruction.from_spec(chosen)
        parts = instruction.to_absolute({name: len(split) for name, split in splits.items()})
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{text} has no split {chosen!r}; it has {', '.join(splits)}. Name one, or a part of one such as "
            f"{next(iter(splits))}[:100] or {next(iter(splits))}[10%:]"
        ) from error
    taken = [splits[part.splitname].select(range(part.from_, max(part.from_, part.to))) for part in parts]
    return taken[0] if len(taken) == 1 else datasets.concatenate_datasets(taken)


def _holds_bytes(kind: Any) -> bool:
    inner = kind.get("bytes") if isinstance(kind, dict) else kind
    return getattr(inner, "dtype", None) in ("binary", "large_binary")


def _explained(text: str, action: Any) -> Any:
    if parse_spec(text).name in _REFUSED:
        raise UserError(f"{text}: this kind of data set may run code and is not opened; save it as parquet")
    try:
        return action()
    except Exception as error:  # the library and the hub's client raise errors of many kinds
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0][:500]
        raise UserError(f"{text} cannot be opened: {reason}") from error
