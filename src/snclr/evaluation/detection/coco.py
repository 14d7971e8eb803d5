"""Find, read and validate a COCO dataset: images, objects, categories and annotation faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.sampler import epoch_order
from snclr.errors import UserError
from snclr.evaluation.detection.annotations import (
    BadEntry,
    CocoImage,
    CocoObject,
    Fault,
    check_category,
    check_image,
    check_object,
)
from snclr.io.hashing import sha256_text

HELD_OUT = 5
"""One image in five is held out if the folder has a single annotation file."""
# Names of the two splits, as folders and inside file names.
_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_SINGLE_FILES = ("instances.json", "annotations.json", "_annotations.coco.json", "coco.json", "instances_default.json")
_OTHER_TYPES = ("caption", "keypoint", "panoptic", "stuff", "image_info")


class PackedObjects:
    """Objects by image number, stored in one array of bytes: workers would copy a million small Python objects."""

    def __init__(self, lists: Iterable[Sequence[CocoObject]]) -> None:
        blobs = [pickle.dumps(list(objects), protocol=5) for objects in lists]
        self._bytes = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        self._ends = np.cumsum([0, *(len(blob) for blob in blobs)])

    def __getitem__(self, number: int) -> list[CocoObject]:
        objects: list[CocoObject] = pickle.loads(self._bytes[self._ends[number] : self._ends[number + 1]].tobytes())
        return objects


@dataclass(frozen=True)
class CocoSet:
    """Usable images of one annotation file, or a subset, numbered from 0 in the order of the file.

    Faults and totals always describe the whole file.
    """

    file: Path
    folder: Path
    images: list[CocoImage]
    objects: PackedObjects
    categories: dict[int, str]
    """Names by id, sorted by id; the first is class 1 of a detector."""
    faults: list[Fault]
    totals: dict[str, int]
    """Annotations and images in the file, the faulty ones included."""
    sha256: str

    def __len__(self) -> int:
        return len(self.images)

    def path(self, number: int) -> Path:
        """Return the path of an image."""
        return self.folder / self.images[number].name

    def classes(self) -> dict[int, int]:
        """Return the detector's class numbers, from 1, by category id."""
        return {key: number for number, key in enumerate(self.categories, start=1)}

    def fingerprint(self) -> str:
        """Return a hash of the annotations and of the images used."""
        names = "\n".join(f"{image.id} {image.name}" for image in self.images)
        return sha256_text(f"{self.sha256}\n{names}")

    def unreadable(self, bad: dict[int, str], action: str) -> list[Fault]:
        """Return unreadable images, given by number, as faults."""
        return [
            Fault(str(self.file), "image", self.images[i].id, f"{self.path(i)}: {why}", action)
            for i, why in bad.items()
        ]

    def take(self, numbers: Sequence[int]) -> CocoSet:
        """Return the set with a subset of its images."""
        packed = PackedObjects(self.objects[number] for number in numbers)
        return replace(self, images=[self.images[number] for number in numbers], objects=packed)

    def trained_on(self, *, keep_empty: bool) -> CocoSet:
        """Return the images for training: those with an object other than a crowd, or all."""
        if keep_empty:
            return self
        return self.take([i for i in range(len(self)) if any(not one.crowd for one in self.objects[i])])

    def check_faults(self, max_share: float) -> None:
        """Raise UserError if more than a share of the annotations or images of the file is unusable."""
        for kind, total in self.totals.items():
            bad = [fault for fault in self.faults if fault.kind == kind]
            if len(bad) > max_share * total:
                raise UserError(
                    f"{len(bad)} of the {total} {kind}s of {self.file} cannot be used; a share of at most "
                    f"{max_share:g} is allowed (--max-bad-share). For example: {'; '.join(map(str, bad))[:600]}"
                )
        if not len(self):
            raise UserError(f"{self.file} has no usable image")


def open_coco(
    data: str | Path, *, train_annotations: str | Path | None = None, val_annotations: str | Path | None = None,
    images: str | Path | None = None, val_images: str | Path | None = None, seed: int = 0,
) -> tuple[CocoSet, CocoSet, str]:  # fmt: skip
    """Open the training and validation set of a folder; also return a description of both."""
    folder = Path(data)
    train_file, val_file = find_annotations(folder, train_annotations, val_annotations)
    train = read_coco(train_file, folder, images)
    if val_file is None:
        order = epoch_order(len(train), seed, 0).tolist()
        held = max(1, len(order) // HELD_OUT)
        description = f"{train_file.name} of {folder}, a seeded {held} of its {len(order)} images held out"
        return train.take(sorted(order[held:])), train.take(sorted(order[:held])), description
    val = read_coco(val_file, folder, val_images or images)
    if val.categories != train.categories:
        first, second = (str(list(part.categories.items())[:4]) for part in (train, val))
        raise UserError(
            f"{train_file} and {val_file} have different categories, such as {first} and {second}. "
            "Ids and names must be the same in both."
        )
    return train, val, f"{train_file.name} and {val_file.name} of {folder}"


def find_annotations(folder: Path, train: str | Path | None, val: str | Path | None) -> tuple[Path, Path | None]:
    """Find the annotation files of a folder, unless `train` and `val` (relative to it, or paths) are given.

    The search covers `annotations/` and the folder itself: instances_train*.json, then any *train*.json, then
    `train/_annotations.coco.json`; the same for val; finally one file for both, without a validation file.
    """
    if not folder.is_dir():
        raise UserError(f"--data {folder} is not a folder; give one with COCO annotation files and images")
    train_file = _given(folder, train, "--train-annotations") if train else _search(folder, "train")
    val_file = _given(folder, val, "--val-annotations") if val else _search(folder, "val")
    if train_file is not None and val_file is None and not train:
        raise UserError(
            f"{folder} has training annotations ({train_file.name}) and none for validation; give --val-annotations "
            "FILE"
        )
    singles = (parent / name for parent in (folder / "annotations", folder) for name in _SINGLE_FILES)
    train_file = train_file or next((path for path in singles if path.is_file()), None)
    if train_file is None:
        raise UserError(
            f"{folder} has no COCO annotation files: looked in {folder} and {folder / 'annotations'} for "
            "instances_train*.json, *train*.json and the same with val. Give --train-annotations and --val-annotations."
        )
    return train_file, val_file


def _given(folder: Path, path: str | Path, flag: str) -> Path:
    for candidate in (Path(path), folder / path):
        if candidate.exists():
            return candidate
    raise UserError(f"{flag} {path} does not exist, also not in {folder}")


def _search(folder: Path, split: str) -> Path | None:
    """Return the annotation file of a split, or None; raise UserError if several match."""
    for name in _SPLITS[split]:
        for pattern in (f"instances_{name}*.json", f"{name}*.json", f"*{name}*.json"):
            for parent in (folder / "annotations", folder):
                files = sorted(path for path in parent.glob(pattern) if _is_split(path, split, name))
                if len(files) > 1:
                    names = ", ".join(path.name for path in files[:4])
                    raise UserError(
                        f"{parent} has several files for {split}: {names}. Give --{split}-annotations FILE."
                    )
                if files:
                    return files[0]
        for single in _SINGLE_FILES:
            if (folder / name / single).is_file():
                return folder / name / single
    return None


def _is_split(path: Path, split: str, name: str) -> bool:
    """Exclude other annotation types (captions, keypoints, panoptic) and the other split."""
    stem = path.stem.lower()
    others = [other for key, names in _SPLITS.items() if key != split for other in names]
    other_split = any(other in stem for other in others) and not stem.startswith((name, f"instances_{name}"))
    return path.is_file() and not other_split and not any(kind in stem for kind in _OTHER_TYPES)


def find_images(folder: Path, file: Path, names: Sequence[str], given: str | Path | None) -> Path:
    """Find the image folder of an annotation file: the first candidate that has one of the first images."""
    if given is not None:
        return _given(folder, given, "--images")
    tag = file.stem.removeprefix("instances_")
    plain = tag.rstrip("0123456789_-")
    splits = (tag, plain, *_SPLITS.get(plain, ()))
    candidates = [
        path for name in splits for path in (folder / name, folder / "images" / name, folder / f"{name}_images")
    ]
    candidates += [file.parent, folder / "images", file.parent / "images", folder / "JPEGImages", folder]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in names[:20]):
            return candidate
    tried = ", ".join(dict.fromkeys(str(path) for path in candidates if path.is_dir()))
    raise UserError(
        f"the images of {file} were not found: {names[0] if names else 'it has no images'} is in none of {tried}. "
        "Give --images FOLDER (and --val-images if they are separate)."
    )


def read_coco(file: Path, root: Path, images: str | Path | None = None) -> CocoSet:
    """Read an annotation file and validate it against the image folder."""
    content, digest = _read_json(file)
    faults: list[Fault] = []
    categories = _categories(content["categories"], file, faults)
    names = [entry.get("file_name") for entry in content["images"] if isinstance(entry, dict)]
    folder = find_images(
        root, file, [name for name in names if isinstance(name, str) and name and "\0" not in name], images
    )
    kept = _images(content["images"], file, folder, faults)
    objects = _objects(content["annotations"], file, kept, categories, faults)
    totals = {"annotation": len(content["annotations"]), "image": len(content["images"])}
    packed = PackedObjects(objects[key] for key in kept)
    return CocoSet(file, folder, list(kept.values()), packed, categories, faults, totals, digest)


def _read_json(file: Path) -> tuple[dict[str, Any], str]:
    try:
        data = file.read_bytes()
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})") from error
    for part in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise UserError(f"{file} is not a COCO instances file: it has no list {part!r}")
    return content, hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _collect_fault(faults: list[Fault], file: Path, kind: str, entry: Any) -> Iterator[int | str | None]:
    """Record a BadEntry of the block as a fault; yield the id of the entry, or None."""
    key = entry.get("id") if isinstance(entry, dict) else None
    key = key if isinstance(key, int | str) else None
    try:
        yield key
    except BadEntry as error:
        faults.append(Fault(str(file), kind, key, str(error)))


def _categories(entries: list[Any], file: Path, faults: list[Fault]) -> dict[int, str]:
    names: dict[int, str] = {}
    for entry in entries:
        with _collect_fault(faults, file, "category", entry):
            key, name = check_category(entry)
            if key in names:
                raise BadEntry("the id is not unique")
            names[key] = name
    if not names:
        raise UserError(f"{file} has no categories")
    return dict(sorted(names.items()))


def _images(entries: list[Any], file: Path, folder: Path, faults: list[Fault]) -> dict[int | str, CocoImage]:
    images: dict[int | str, CocoImage] = {}
    for entry in entries:
        with _collect_fault(faults, file, "image", entry):
            image = check_image(entry)
            if image.id in images:
                raise BadEntry("the id is not unique")
            if not (folder / image.name).is_file():
                raise BadEntry(f"the file {image.name} is missing in {folder}")
            images[image.id] = image
    return images


def _objects(
    entries: list[Any], file: Path, images: dict[int | str, CocoImage], categories: dict[int, str], faults: list[Fault]
) -> dict[int | str, list[CocoObject]]:
    objects: dict[int | str, list[CocoObject]] = {key: [] for key in images}
    bad_images = {fault.id for fault in faults if fault.kind == "image"}
    seen: set[int | str] = set()
    for entry in entries:
        with _collect_fault(faults, file, "annotation", entry) as key:
            image = entry.get("image_id") if isinstance(entry, dict) else None
            if not isinstance(image, int | str):
                raise BadEntry(f"image_id is {image!r:.60}, not a number")
            if image not in images:
                if image in bad_images:
                    continue  # reported as a fault of the image
                raise BadEntry(f"image id {image!r:.60} is unknown")
            if key in seen:
                raise BadEntry("the id is not unique")
            objects[image].append(check_object(entry, images[image], categories))
            if key is not None:
                seen.add(key)
    return objects
