"""Hugging Face datasets, `hf:OWNER/NAME`, with random access.

Images are read as encoded bytes and decoded by `snclr.data.decode`. Datasets with a loading script are refused:
version 4 of the library, which is required, does not run them.
"""

import hashlib
import importlib
import io
import os
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import BadImage, RGBImage, decode, decode_stream
from snclr.data.labels import number_labels
from snclr.errors import UserError

# Names of each split, in order of preference.
_SPLITS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation", "val", "valid", "dev"),
}
_OPTIONS = ("image", "label", "revision", "data_files", "data_dir")
# Builders of the library that unpickle files or run queries or programs.
_REFUSED = ("pandas", "sql", "spark", "generator", "cache")
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls")
_SAMPLE = 256
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Spec:
    """A parsed name: `hf:NAME[@CONFIG][:SPLIT][?image=COLUMN&label=COLUMN&revision=…&data_files=…&data_dir=…]`."""

    name: str
    config: str | None = None
    split: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    text: str = field(default="", compare=False, repr=False)
    """What the user typed, for errors."""


def names_huggingface(text: str) -> bool:
    """Return whether the text names a Hugging Face dataset; `hf://` is the URL of a file on the hub."""
    return text.startswith("hf:") and not text.startswith("hf://")


def parse_spec(text: str) -> Spec:
    """Parse a dataset name.

    >>> parse_spec("hf:ylecun/mnist@mnist:test?image=image")
    Spec(name='ylecun/mnist', config='mnist', split='test', options={'image': 'image'})
    """
    name, _, query = text.removeprefix("hf:").partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    unknown = [option for option, value in pairs if option not in _OPTIONS or not value]
    match = re.fullmatch(r"(.+?)(?:@([^/@]+?))?(?::([^/:\[\]]+(?:\[[^\[\]]*\])?))?", name, re.DOTALL)
    if match is None or unknown:
        problem = f"unknown or empty options {', '.join(unknown)}" if unknown else "there is no name"
        raise UserError(
            f"{text!r}: {problem}; write hf:OWNER/NAME[@CONFIG][:SPLIT][?OPTION=VALUE&…] with the options "
            f"{', '.join(_OPTIONS)}"
        )
    return Spec(match[1], match[2], match[3], dict(pairs), text)


class HuggingFaceDataset(ImageDataset):
    """A map-style dataset of the library `datasets`; workers memory-map its tables."""

    def __init__(self, dataset: Any, spec: Spec) -> None:
        self._column, label = _find_columns(dataset.features, spec)
        if not len(dataset):
            raise UserError(f"{spec.text} has no images in it")
        self.name = spec.text
        names = getattr(dataset.features.get(label), "names", None)
        values = [] if label is None else dataset[label]
        texts = [None if value in (None, -1) else names[value] if names else str(value) for value in values]
        self.labels, self.classes = number_labels(texts, names)
        datasets = _library()
        if isinstance(dataset.features[self._column], datasets.Image):  # the library's decoder would open any format
            dataset = dataset.cast_column(self._column, datasets.Image(decode=False))
        self._rows = dataset.select_columns([self._column])

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
        """Return the bytes and the path of an undecoded image; either may be missing."""
        value = self._rows[index][self._column]
        if isinstance(value, dict):
            return value.get("bytes"), value.get("path")
        return (bytes(value) if isinstance(value, (bytes, bytearray)) else None), None


def open_huggingface(text: str, *, split: str = "train") -> ImageDataset:
    """Open `hf:…`; a split in the name takes precedence over `split`."""
    spec = parse_spec(text)
    saved = _saved_splits(spec)
    chosen = spec.split or _pick(_split_names(spec, saved), split, text)
    if saved is not None:
        return HuggingFaceDataset(_take_split(saved, chosen, text), spec)
    return HuggingFaceDataset(_call(spec, "load_dataset", spec.config, split=chosen, **_load_options(spec)), spec)


def has_test_split(text: str) -> bool:
    """Return whether the dataset has both a training and a test split."""
    spec = parse_spec(text)
    if spec.split is not None:
        return False
    names = set(_split_names(spec, _saved_splits(spec)))
    return not names.isdisjoint(_SPLITS["train"]) and not names.isdisjoint(_SPLITS["test"])


def _find_columns(features: Any, spec: Spec) -> tuple[str, str | None]:
    """Return the image column and the label column (or None): those of the spec, or by their types and names."""
    datasets = _library()
    name, image, label = spec.text, spec.options.get("image"), spec.options.get("label")
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


def _library() -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError("Hugging Face datasets need a package: pip install 'snclr[huggingface]'") from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise UserError(
            f"version {datasets.__version__} of the package datasets may run a dataset's loading script; "
            "pip install 'datasets>=4'"
        )
    return datasets


def _split_names(spec: Spec, saved: dict[str, Any] | None) -> list[str]:
    return list(_call(spec, "get_dataset_split_names", spec.config, **_load_options(spec)) if saved is None else saved)


def _pick(names: Sequence[str], split: str, text: str) -> str:
    found = next((name for name in _SPLITS.get(split, (split,)) if name in names), None)
    if found is None and split == "train" and len(names) == 1:
        return names[0]
    if found is None:
        raise UserError(f"{text} has no split {split!r}; it has {', '.join(names)}. Name one: {text}:{names[0]}")
    return found


def _load_options(spec: Spec) -> dict[str, str]:
    return {name: spec.options[name] for name in ("revision", "data_files", "data_dir") if name in spec.options}


def _saved_splits(spec: Spec) -> dict[str, Any] | None:
    """Return the splits of a folder written by `save_to_disk` by name, or None if it is not one.

    A single split has its original name, or `train`.
    """
    if not any((Path(spec.name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return None
    found = _call(spec, "load_from_disk")
    if isinstance(found, dict):
        return dict(found)
    match = re.fullmatch(r"(\w+)(\[.*\])?", str(found.split or ""))
    return {match[1] if match else "train": found}


def _take_split(splits: dict[str, Any], chosen: str, text: str) -> Any:
    """Return a split or a slice of it, such as `train[:100]` or `train[10%:]`."""
    datasets = _library()
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


def _call(spec: Spec, function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the library with the dataset's name; explain its errors."""
    datasets = _library()
    if spec.name in _REFUSED:
        raise UserError(f"{spec.text}: this kind of dataset may run code and is refused; save it as parquet")
    with _offline_if_unreachable(datasets, local=Path(spec.name).exists()) as unreachable:
        try:
            return getattr(datasets, function)(spec.name, *arguments, **options)
        except Exception as error:  # the library and the hub client raise many types
            reason = (str(error).strip() or type(error).__name__).partition("\n")[0][:500]
            if unreachable:
                reason = f"{unreachable}, and it is not in the local cache. Check the network."
            raise UserError(f"{spec.text} cannot be opened: {reason}") from error


def check_reachable(text: str) -> None:
    """Raise UserError if the hub cannot be reached and its default cache has nothing of that name.

    Without the library, whose import takes seconds. With other addresses, caches or a proxy, the library finds out.
    """
    name = parse_spec(text).name
    settings = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
    if Path(name).exists() or any(setting in os.environ for setting in settings) or "datasets" in sys.modules:
        return
    short_name = name.rpartition("/")[2].lower()
    cached = any(short_name in path.name.lower() for path in Path("~/.cache/huggingface").expanduser().glob("*/*"))
    if not cached and (reason := _unreachable("huggingface.co", 443)):
        raise UserError(f"{text} cannot be opened: {reason}, and it is not in the local cache. Check the network.")


def _unreachable(host: str, port: int) -> str | None:
    """Return why a host cannot be reached, or None."""
    if "https" in urllib.request.getproxies():
        return None
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return f"{host} cannot be reached ({error.strerror or error})"
    return None


@contextmanager
def _offline_if_unreachable(datasets: Any, *, local: bool) -> Iterator[str | None]:
    """Within the block, use only the local cache if the hub cannot be reached; yield the reason, or None.

    The hub client retries each request for about 40 seconds, also if there is no network at all.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    reason = None
    if not (local or before[1]) and (reason := _unreachable(str(address.hostname), address.port or 443)):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
