"""Find, read and validate a COCO dataset: images, objects, categories and annotation faults."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
Item = TypeVar("Item")


class PackedObjects:
    """Objects by image number, stored as bytes: workers would copy a million small Python objects."""

    def __init__(self, lists: Iterable[Sequence[CocoObject]]) -> None:
        self._pickled = [pickle.dumps(list(objects), protocol=5) for objects in lists]

    def __getitem__(self, number: int) -> list[CocoObject]:
        objects: list[CocoObject] = pickle.loads(self._pickled[number])
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

    def for_training(self, *, keep_empty: bool) -> CocoSet:
        """Return the images to train on: those with an object other than a crowd, or all."""
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
        raise UserError(f"{folder} has annotations for training ({train_file.name}) only; give --val-annotations FILE")
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
    parents = (folder / "annotations", folder)
    for name in _SPLITS[split]:
        patterns = (f"instances_{name}*.json", f"{name}*.json", f"*{name}*.json")
        matches = [sorted(parent.glob(pattern)) for pattern in patterns for parent in parents]
        matches += [[folder / name / single] for single in _SINGLE_FILES]
        for paths in matches:
            files = [path for path in paths if path.is_file() and _is_split(path.stem.lower(), split, name)]
            if len(files) > 1:
                names = ", ".join(path.name for path in files[:4])
                raise UserError(
                    f"{files[0].parent} has several files for {split}: {names}. Give --{split}-annotations FILE."
                )
            if files:
                return files[0]
    return None


def _is_split(stem: str, split: str, name: str) -> bool:
    """Exclude other annotation types (captions, keypoints, panoptic) and the other split."""
    others = [other for key, names in _SPLITS.items() if key != split for other in names]
    other_split = any(other in stem for other in others) and not stem.startswith((name, f"instances_{name}"))
    return not other_split and not any(kind in stem for kind in _OTHER_TYPES)


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


def read_coco(file: Path, root: Path, given_folder: str | Path | None = None) -> CocoSet:
    """Read an annotation file and validate it against the image folder."""
    try:
        data = file.read_bytes()
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})") from error
    for part in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise UserError(f"{file} is not a COCO instances file: it has no list {part!r}")
    faults: list[Fault] = []
    categories = dict(sorted(_usable(content["categories"], file, "category", faults, check_category)))
    if not categories:
        raise UserError(f"{file} has no categories")
    given_names = (entry.get("file_name") for entry in content["images"] if isinstance(entry, dict))
    names = [name for name in given_names if isinstance(name, str) and name and "\0" not in name]
    folder = find_images(root, file, names, given_folder)
    usable_images = _usable(content["images"], file, "image", faults, lambda entry: check_image(entry, folder))
    images = {image.id: image for image in usable_images}
    bad_images = {fault.id for fault in faults if fault.kind == "image"}

    def check_annotation(entry: dict[str, Any]) -> tuple[int | str, CocoObject] | None:
        key = entry.get("image_id")
        if not isinstance(key, int | str):
            raise BadEntry(f"image_id is {key!r:.60}, not a number")
        if key in images:
            return key, check_object(entry, images[key], categories)
        if key in bad_images:
            return None  # reported as a fault of the image
        raise BadEntry(f"image id {key!r:.60} is unknown")

    objects: dict[int | str, list[CocoObject]] = {key: [] for key in images}
    for key, found in _usable(content["annotations"], file, "annotation", faults, check_annotation):
        objects[key].append(found)
    totals = {"annotation": len(content["annotations"]), "image": len(content["images"])}
    digest = hashlib.sha256(data).hexdigest()
    return CocoSet(
        file, folder, [*images.values()], PackedObjects(objects.values()), categories, faults, totals, digest
    )


def _usable(
    entries: list[Any], file: Path, kind: str, faults: list[Fault], check: Callable[[dict[str, Any]], Item | None]
) -> Iterator[Item]:
    """Yield what `check` returns for each entry; record an entry that it rejects, or whose id is taken, as a fault."""
    taken: set[int | str] = set()
    for entry in entries:
        key = entry.get("id") if isinstance(entry, dict) else None
        key = key if isinstance(key, int | str) else None
        try:
            if not isinstance(entry, dict):
                raise BadEntry(f"the entry is not an object: {entry!r:.60}")
            item = check(entry)
            if item is None:
                continue
            if key in taken:
                raise BadEntry("the id is not unique")
        except BadEntry as error:
            faults.append(Fault(str(file), kind, key, str(error)))
            continue
        if key is not None:
            taken.add(key)
        yield item
