"""Hugging Face datasets: `hf:OWNER/NAME` with random access, `hf-stream:OWNER/NAME` copied once into local shards.

Images are read as encoded bytes and decoded by `snclr.data.decode`. Datasets with a loading script are refused:
version 4 of the library, which is required, does not run them.
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

from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import BadImage, RGBImage, decode, decode_stream
from snclr.data.labels import Labels, number_labels
from snclr.errors import UserError

# Names of each split, in order of preference.
_SPLITS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation", "val", "valid", "dev"),
}
_OPTIONS = ("image", "label", "revision", "data_files", "data_dir", "limit")
# Builders of the library that unpickle files or run queries or programs.
_REFUSED = ("pandas", "sql", "spark", "generator", "cache")
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")
_SAMPLE = 256


@dataclass(frozen=True)
class Spec:
    """A parsed name: `hf:NAME[@CONFIG][:SPLIT][?image=COLUMN&label=COLUMN&revision=…&data_files=…&data_dir=…]`."""

    name: str
    config: str | None = None
    split: str | None = None
    stream: bool = False
    options: dict[str, str] = field(default_factory=dict)


def names_huggingface(text: str) -> bool:
    """Return whether the text names a Hugging Face dataset; `hf://` is the URL of a file on the hub."""
    return text.startswith(("hf:", "hf-stream:")) and not text.startswith("hf://")


def parse_spec(text: str) -> Spec:
    """Parse a dataset name.

    >>> parse_spec("hf:ylecun/mnist@mnist:test?image=image")
    Spec(name='ylecun/mnist', config='mnist', split='test', stream=False, options={'image': 'image'})
    """
    kind, _, rest = text.partition(":")
    name, _, query = rest.partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    unknown = [option for option, value in pairs if option not in _OPTIONS or not value]
    split, config = None, None
    if match := re.fullmatch(r"(.+):([^/:\[\]]+(?:\[[^\[\]]*\])?)", name):
        name, split = match[1], match[2]
    if match := re.fullmatch(r"(.+)@([^/@]+)", name):
        name, config = match[1], match[2]
    if not name or unknown:
        problem = f"unknown or empty options {', '.join(unknown)}" if unknown else "there is no name"
        raise UserError(
            f"{text!r}: {problem}; write hf:OWNER/NAME[@CONFIG][:SPLIT][?OPTION=VALUE&…] with the options "
            f"{', '.join(_OPTIONS)}, or hf-stream: in place of hf:"
        )
    return Spec(name, config, split, kind == "hf-stream", dict(pairs))


class HuggingFaceDataset:
    """A map-style dataset of the library `datasets`; workers memory-map its tables."""

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

    def load(self, index: int, min_side: int | None = None) -> RGBImage:
        """Decode one image, uint8 (H, W, 3) RGB; raises BadImage."""
        data, path = self._cell(index)
        if data is not None:
            return decode_stream(io.BytesIO(data), min_side)
        if path is not None:
            return decode(path, min_side)
        raise BadImage("no image in this row")

    def key(self, index: int) -> str:
        """Return the row number, and the file name if the dataset has it."""
        path = self._cell(index)[1]
        return f"{self.name}/{index}" + (f"/{Path(path).name}" if path else "")

    def fingerprint(self) -> str:
        """Hash the number of images, the labels, and a sample of the images."""
        digest = hashlib.sha256(f"{len(self)}\0{self.classes}".encode())
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), _SAMPLE)).astype(np.int64).tolist():
            data, path = self._cell(index)
            digest.update(hashlib.sha256(data or b"").digest() + Path(path or "").name.encode())
        return digest.hexdigest()

    def _cell(self, index: int) -> tuple[bytes | None, str | None]:
        return image_cell(self._rows[index][self._column])


def image_cell(value: Any) -> tuple[bytes | None, str | None]:
    """Return the bytes and the path of an undecoded image; either may be missing."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    return (bytes(value) if isinstance(value, (bytes, bytearray)) else None), None


def open_huggingface(text: str, *, split: str = "train") -> ImageDataset:
    """Open `hf:…` or `hf-stream:…`; a split in the name takes precedence over `split`."""
    spec = parse_spec(text)
    if spec.stream:
        from snclr.data.datasets.huggingface_stream import open_stream

        return open_stream(text, spec, split)
    if "limit" in spec.options:
        raise UserError(f"{text!r}: limit requires hf-stream:; give a split such as :train[:1000] instead")
    dataset = load(text, spec, split, streaming=False)
    return HuggingFaceDataset(dataset, name=text, image=spec.options.get("image"), label=spec.options.get("label"))


def has_test_split(text: str) -> bool:
    """Return whether the dataset has both a training and a test split."""
    spec = parse_spec(text)
    if spec.split is not None:
        return False
    names = _split_names(text, spec)
    return any(name in names for name in _SPLITS["train"]) and any(name in names for name in _SPLITS["test"])


def load(text: str, spec: Spec, split: str, *, streaming: bool) -> Any:
    """Load one split with the library; UserError if that fails."""
    datasets = _library(text)
    chosen = spec.split or _pick(_split_names(text, spec), split, text)
    if _saved(spec.name):
        found = _take_split(_saved_splits(text, spec), chosen, text)
        return found.to_iterable_dataset() if streaming else found
    return _explained(
        text,
        lambda: datasets.load_dataset(spec.name, spec.config, split=chosen, streaming=streaming, **_load_options(spec)),
    )


def find_columns(features: Any, name: str, *, image: str | None, label: str | None) -> tuple[str, str | None]:
    """Return the image column and the label column (or None), from their types and names."""
    datasets = _library(name)
    if features is None:
        raise UserError(f"{name} has no column types; use another format, such as parquet")
    for column in (image, label):
        if column is not None and column not in features:
            raise UserError(f"{name} has no column {column!r}; it has {', '.join(features)}")
    if image is None:
        images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
        images = images or [c for c, kind in features.items() if c.lower() in _IMAGE_NAMES and _holds_bytes(kind)]
        preferred = [column for column in images if column.lower() in _IMAGE_NAMES]
        if len(images) != 1 and len(preferred) != 1:
            problem = f"several image columns ({', '.join(images)})" if images else "no image column"
            raise UserError(f"{name} has {problem}; add ?image=COLUMN with one of {', '.join(features)}")
        image = images[0] if len(images) == 1 else preferred[0]
    if label is None:
        classes = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        preferred = [column for column in _LABEL_NAMES if column in classes]
        label = preferred[0] if preferred else classes[0] if len(classes) == 1 else None
    return image, label


def undecoded(dataset: Any, column: str) -> Any:
    """Return the dataset with encoded images: the library's decoder would open any format."""
    datasets = _library(column)
    if isinstance(dataset.features[column], datasets.Image):
        return dataset.cast_column(column, datasets.Image(decode=False))
    return dataset


def label_texts(values: Sequence[Any], kind: Any) -> list[str | None]:
    """Return the names of labels; None for missing ones and -1."""
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
        raise UserError(f"{text}: Hugging Face datasets need a package: pip install 'snclr[huggingface]'") from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise UserError(
            f"{text}: version {datasets.__version__} of the package datasets may run a dataset's loading script; "
            "pip install 'datasets>=4'"
        )
    return datasets


def _split_names(text: str, spec: Spec) -> list[str]:
    datasets = _library(text)
    if _saved(spec.name):
        return list(_saved_splits(text, spec))
    names: list[str] = _explained(
        text, lambda: datasets.get_dataset_split_names(spec.name, spec.config, **_load_options(spec))
    )
    return names


def _pick(names: Sequence[str], split: str, text: str) -> str:
    found = next((name for name in _SPLITS.get(split, (split,)) if name in names), None)
    if found is None and split == "train" and len(names) == 1:
        return names[0]
    if found is None:
        raise UserError(f"{text} has no split {split!r}; it has {', '.join(names)}. Name one: {text}:{names[0]}")
    return found


def _load_options(spec: Spec) -> dict[str, str]:
    return {name: spec.options[name] for name in ("revision", "data_files", "data_dir") if name in spec.options}


def _saved(name: str) -> bool:
    """Return whether it is a folder written by `save_to_disk`."""
    folder = Path(name)
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved_splits(text: str, spec: Spec) -> dict[str, Any]:
    """Return the splits of a saved folder by name; a single split has its original name, or `train`."""
    datasets = _library(text)
    found = _explained(text, lambda: datasets.load_from_disk(spec.name))
    if isinstance(found, dict):
        return dict(found)
    match = re.fullmatch(r"(\w+)(\[.*\])?", str(found.split or ""))
    return {match[1] if match else "train": found}


def _take_split(splits: dict[str, Any], chosen: str, text: str) -> Any:
    """Return a split or a slice of it, such as `train[:100]` or `train[10%:]`."""
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
        raise UserError(f"{text}: this kind of dataset may run code and is refused; save it as parquet")
    try:
        return action()
    except Exception as error:  # the library and the hub client raise many types
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0][:500]
        raise UserError(f"{text} cannot be opened: {reason}") from error
