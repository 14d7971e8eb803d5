"""A COCO-format data set, read and checked: images, objects, categories, and every fault that was found.

The objects of an image are kept as bytes and unpacked when asked for: a million small Python objects would be copied
into every worker.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.order import epoch_order
from snclr.detection.annotation_check import BadEntry, CocoImage, CocoObject, Fault, check_image, check_object
from snclr.detection.coco_layout import Layout, find_annotations, find_images
from snclr.errors import UserError

HELD_OUT = 5
"""One image in so many is held out where the folder has one annotation file alone."""


class PackedObjects:
    """Lists of objects by image number, as one array of bytes."""

    def __init__(self, lists: Iterable[Sequence[CocoObject]]) -> None:
        blobs = [pickle.dumps(list(objects), protocol=5) for objects in lists]
        self._bytes = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        self._ends = np.cumsum([0, *(len(blob) for blob in blobs)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> list[CocoObject]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        found: list[CocoObject] = pickle.loads(self._bytes[self._ends[number] : self._ends[number + 1]].tobytes())
        return found


@dataclass(frozen=True)
class CocoSet:
    """The usable images of one annotation file, or some of them, numbered from 0 in the order of the file.

    Faults and totals are the whole file's, however few of its images are taken.
    """

    file: Path
    folder: Path
    images: list[CocoImage]
    objects: PackedObjects
    categories: dict[int, str]
    """Names by id, sorted by id; a detector's class 1 is the first."""
    faults: list[Fault]
    entries: int
    """Annotations in the file, the faulty ones included."""
    listed: int
    """Images in the file, the faulty ones included."""
    sha256: str

    def __len__(self) -> int:
        return len(self.images)

    def path(self, number: int) -> Path:
        """Where an image is."""
        return self.folder / self.images[number].name

    def classes(self) -> dict[int, int]:
        """The detector's class numbers (from 1) by category id."""
        return {key: number for number, key in enumerate(self.categories, start=1)}

    def fingerprint(self) -> str:
        """A hash that changes with the annotations, and with which images are used."""
        names = "\n".join(f"{image.id} {image.name}" for image in self.images)
        return hashlib.sha256(f"{self.sha256}\n{names}".encode()).hexdigest()

    def unreadable(self, bad: dict[int, str], action: str) -> list[Fault]:
        """Images (by number) that were found bad while they were read, as faults."""
        return [
            Fault(str(self.file), "image", self.images[i].id, f"{self.path(i)}: {why}", action)
            for i, why in bad.items()
        ]

    def take(self, numbers: Sequence[int]) -> CocoSet:
        """The same set with some of its images."""
        packed = PackedObjects(self.objects[number] for number in numbers)
        return CocoSet(
            self.file, self.folder, [self.images[number] for number in numbers], packed, self.categories, self.faults,
            self.entries, self.listed, self.sha256,
        )  # fmt: skip

    def trained_on(self, *, keep_empty: bool) -> CocoSet:
        """The images training uses: those with an object that is no crowd, or all of them."""
        if keep_empty:
            return self
        return self.take([i for i in range(len(self)) if any(not found.crowd for found in self.objects[i])])


def read_coco(file: Path, layout: Layout, images: str | Path | None = None) -> CocoSet:
    """Read an annotation file and check all of it against itself and the image folder."""
    content, digest = _read_json(file)
    faults: list[Fault] = []
    categories = _categories(content, file, faults)
    names = [e["file_name"] for e in content["images"] if isinstance(e, dict) and isinstance(e.get("file_name"), str)]
    folder = find_images(layout, file, (name for name in names if name and "\0" not in name), images)
    found = _images(content["images"], file, folder, faults)
    objects = _objects(content["annotations"], file, found, categories, faults)
    kept = list(found.values())
    packed = PackedObjects(objects[image.id] for image in kept)
    totals = len(content["annotations"]), len(content["images"])
    return CocoSet(file, folder, kept, packed, categories, faults, *totals, digest)


def open_coco(
    data: str | Path, *, train_annotations: str | Path | None = None, val_annotations: str | Path | None = None,
    images: str | Path | None = None, val_images: str | Path | None = None, seed: int = 0,
) -> tuple[CocoSet, CocoSet, str]:  # fmt: skip
    """The training and the validation part of a folder, and in words where they come from."""
    layout = find_annotations(data, train_annotations, val_annotations)
    train = read_coco(layout.train, layout, images)
    if layout.val is not None:
        val = read_coco(layout.val, layout, val_images or images)
        if val.categories != train.categories:
            raise UserError(
                f"{layout.train} and {layout.val} have different categories: {_some(train.categories)} and "
                f"{_some(val.categories)}. Ids and names must be the same in both."
            )
        return train, val, f"{layout.train.name} and {layout.val.name} of {layout.folder}"
    order = epoch_order(len(train), seed, 0).tolist()
    held = max(1, len(order) // HELD_OUT)
    words = f"{layout.train.name} of {layout.folder}, a seeded {held} of its {len(order)} images held out"
    return train.take(sorted(order[held:])), train.take(sorted(order[:held])), words


def check_share(coco: CocoSet, most: float) -> None:
    """Stop where more than a share of a file's annotations (or of its images) cannot be used."""
    for kind, total in (("annotation", coco.entries), ("image", coco.listed)):
        bad = sum(fault.kind == kind and fault.action == "left out" for fault in coco.faults)
        if bad > most * total:
            examples = "; ".join(str(fault) for fault in coco.faults if fault.kind == kind)[:600]
            raise UserError(
                f"{bad} of the {total} {kind}s of {coco.file} cannot be used; a share of at most {most:g} is allowed "
                f"(--max-bad-share). For example: {examples}"
            )
    if not len(coco):
        raise UserError(f"{coco.file} has no usable image")


def _read_json(file: Path) -> tuple[dict[str, Any], str]:
    try:
        data = file.read_bytes()
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a COCO annotation file: it holds no object with images and annotations")
    for part in ("images", "annotations", "categories"):
        if not isinstance(content.get(part), list):
            raise UserError(f"{file} is not a COCO instances file: it has no list {part!r}")
    return content, hashlib.sha256(data).hexdigest()


def _categories(content: dict[str, Any], file: Path, faults: list[Fault]) -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in content["categories"]:
        key = entry.get("id") if isinstance(entry, dict) else None
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(key, int) or isinstance(key, bool) or not isinstance(name, str):
            faults.append(Fault(str(file), "category", None, f"a category needs an id and a name, not {entry!r:.80}"))
        elif key in found:
            faults.append(Fault(str(file), "category", key, "the id is there twice"))
        else:
            found[key] = name
    if not found:
        raise UserError(f"{file} has no categories")
    return dict(sorted(found.items()))


def _images(entries: list[Any], file: Path, folder: Path, faults: list[Fault]) -> dict[int | str, CocoImage]:
    found: dict[int | str, CocoImage] = {}
    for entry in entries:
        try:
            image = check_image(entry)
            if image.id in found:
                raise BadEntry("the id is there twice")
            if not (folder / image.name).is_file():
                raise BadEntry(f"the file {image.name} is missing in {folder}")
            found[image.id] = image
        except BadEntry as error:
            key = entry.get("id") if isinstance(entry, dict) else None
            faults.append(Fault(str(file), "image", key if isinstance(key, int | str) else None, str(error)))
    return found


def _objects(
    entries: list[Any], file: Path, images: dict[int | str, CocoImage], categories: dict[int, str], faults: list[Fault]
) -> dict[int | str, list[CocoObject]]:
    found: dict[int | str, list[CocoObject]] = {key: [] for key in images}
    lost = {fault.id for fault in faults if fault.kind == "image"}
    seen: set[int | str] = set()
    for entry in entries:
        raw = entry.get("id") if isinstance(entry, dict) else None
        key = raw if isinstance(raw, int | str) else None
        try:
            if not isinstance(entry, dict):
                raise BadEntry("the entry is not an object")
            image = entry.get("image_id")
            if not isinstance(image, int | str):
                raise BadEntry(f"image_id is {image!r:.60}, not a number")
            if image in lost and image not in images:
                continue  # the image's own fault says it
            if image not in images:
                raise BadEntry(f"image id {image!r} is unknown")
            if key is not None and key in seen:
                raise BadEntry("the id is there twice")
            made, clipped = check_object(entry, images[image], categories)
            found[image].append(made)
            if key is not None:
                seen.add(key)
            if clipped:
                faults.append(Fault(str(file), "annotation", key, clipped, "clipped"))
        except BadEntry as error:
            faults.append(Fault(str(file), "annotation", key, str(error)))
    return found


def _some(categories: dict[int, str]) -> str:
    words = [f"{key} {name}" for key, name in list(categories.items())[:4]]
    return ", ".join(words) + (" …" if len(categories) > 4 else "")
