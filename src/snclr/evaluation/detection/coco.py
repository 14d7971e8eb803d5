"""Find, read and validate a COCO dataset: images, objects and categories.

An unusable entry of an annotation file is left out and listed as a fault. Boxes are clipped to their image.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from snclr.data.sampler import epoch_order
from snclr.errors import UserError
from snclr.io.hashing import sha256_bytes, sha256_text
from snclr.io.jsonl import is_finite_number

HELD_OUT = 5
"""One image in five is held out if the folder has a single annotation file."""
# Names of the two splits, as folders and inside file names.
_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_SINGLE_FILES = ("instances.json", "annotations.json", "_annotations.coco.json", "coco.json", "instances_default.json")
_OTHER_TYPES = ("caption", "keypoint", "panoptic", "stuff", "image_info")
_MAX_SIDE = 2**31  # pixels
Item = TypeVar("Item")


@dataclass(frozen=True)
class Fault:
    """A fault in an entry of an annotation file, and how it was handled."""

    file: str
    kind: str
    """"image", "annotation" or "category"."""
    id: int | str | None
    reason: str
    action: str = "left out"

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} {self.id}: {self.reason} ({self.action})"


class BadEntry(Exception):
    """An unusable entry; the message is the reason."""


@dataclass(frozen=True)
class CocoImage:
    """An image; its name is relative to the image folder."""

    id: int | str
    name: str
    width: int
    height: int


@dataclass(frozen=True)
class CocoObject:
    """An object: box (x, y, width, height) in pixels, its mask as polygons or RLE, and its category's id."""

    category: int
    box: tuple[float, float, float, float]
    segmentation: Any
    area: float
    crowd: bool


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

    def take(self, numbers: Sequence[int]) -> "CocoSet":
        """Return the set with a subset of its images."""
        packed = PackedObjects(self.objects[number] for number in numbers)
        return replace(self, images=[self.images[number] for number in numbers], objects=packed)

    def for_training(self, *, keep_empty: bool) -> "CocoSet":
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
        return _given(folder, given, "--images or --val-images")
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
    packed = PackedObjects(objects.values())
    return CocoSet(file, folder, [*images.values()], packed, categories, faults, totals, sha256_bytes(data))


def _usable(
    entries: list[Any], file: Path, kind: str, faults: list[Fault], check: Callable[[dict[str, Any]], Item | None]
) -> Iterator[Item]:
    """Yield what `check` returns for each entry; record an entry that it rejects, or whose id is taken, as a fault."""
    taken: set[int | str | None] = set()
    for entry in entries:
        key = entry.get("id") if isinstance(entry, dict) else None
        key = key if isinstance(key, int | str) else None
        try:
            if not isinstance(entry, dict):
                raise BadEntry(f"the entry is not an object: {entry!r:.60}")
            item = check(entry)
            if item is not None and key is not None and key in taken:
                raise BadEntry("the id is not unique")
        except BadEntry as error:
            faults.append(Fault(str(file), kind, key, str(error)))
        else:
            if item is not None:
                taken.add(key)
                yield item


def check_category(entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return id and name of a category; raise BadEntry if it is unusable."""
    key, name = entry.get("id"), entry.get("name")
    if type(key) is not int or not isinstance(name, str):
        raise BadEntry(f"a category needs an id and a name, not {entry!r:.80}")
    return key, name


def check_image(entry: Mapping[str, Any], folder: Path) -> CocoImage:
    """Return the image that an entry describes; raise BadEntry if it is unusable or its file is missing."""
    key, name, width, height = (entry.get(field) for field in ("id", "file_name", "width", "height"))
    if not isinstance(key, int | str) or isinstance(key, bool):
        raise BadEntry(f"id is {key!r:.60}, not a number")
    if not isinstance(name, str) or not name or "\0" in name:
        raise BadEntry(f"file_name is {name!r:.60}")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise BadEntry(f"file_name {name!r} leads out of the image folder")
    if not (isinstance(width, int) and isinstance(height, int) and 0 < width < _MAX_SIDE and 0 < height < _MAX_SIDE):
        raise BadEntry(f"width and height are {width!r:.60} and {height!r:.60}, not integers of at least 1")
    if not (folder / name).is_file():
        raise BadEntry(f"the file {name} is missing in {folder}")
    return CocoImage(key, name, width, height)


def check_object(entry: Mapping[str, Any], image: CocoImage, categories: Mapping[int, str]) -> CocoObject:
    """Return the object of an annotation; raise BadEntry if it is unusable."""
    category, crowd, area = entry.get("category_id"), entry.get("iscrowd", 0), entry.get("area")
    if not isinstance(category, int) or category not in categories:
        raise BadEntry(f"category id {category!r:.60} is unknown")
    if crowd not in (0, 1):
        raise BadEntry(f"iscrowd is {crowd!r:.60}, neither 0 nor 1")
    box = _check_box(entry.get("bbox"), image)
    value = entry.get("segmentation")
    segmentation = _check_rle(value, image) if isinstance(value, dict) else _check_polygons(value, image)
    if not isinstance(area, int | float) or not is_finite_number(area) or area <= 0:
        area = box[2] * box[3]
    return CocoObject(category, box, segmentation, float(area), bool(crowd))


def _check_box(box: Any, image: CocoImage) -> tuple[float, float, float, float]:
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite_number, box)):
        raise BadEntry(f"bbox is {box!r:.60}, not four finite numbers")
    x, y, width, height = (float(value) for value in box)
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, float(image.width)), min(y + height, float(image.height))
    if right <= left or bottom <= top:
        raise BadEntry(f"bbox {box!r:.60} has no area in the image of {image.width}×{image.height}")
    return left, top, right - left, bottom - top


def _check_polygons(polygons: Any, image: CocoImage) -> list[list[float]]:
    if not isinstance(polygons, list) or not polygons:
        raise BadEntry("the segmentation is missing")
    for polygon in polygons:
        if not (isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0):
            raise BadEntry("the segmentation is neither an RLE nor polygons of three or more points")
        if not all(map(is_finite_number, polygon)):
            raise BadEntry("a polygon has coordinates that are not finite numbers")
    xs = [x for polygon in polygons for x in polygon[0::2]]
    ys = [y for polygon in polygons for y in polygon[1::2]]
    inside = max(xs) > 0 and max(ys) > 0 and min(xs) < image.width and min(ys) < image.height
    if not inside or max(xs) <= min(xs) or max(ys) <= min(ys):
        raise BadEntry(f"the polygons have no area in the image of {image.width}×{image.height}")
    return [[float(number) for number in polygon] for polygon in polygons]


def _check_rle(value: dict[str, Any], image: CocoImage) -> dict[str, Any]:
    """Return {"size", "counts"} after checking that the runs fill the image."""
    size, counts = value.get("size"), value.get("counts")
    if size != [image.height, image.width]:
        raise BadEntry(f"the RLE is of size {size!r:.60}; the image is [{image.height}, {image.width}]")
    try:
        runs = rle_runs(counts) if isinstance(counts, str) else counts
    except ValueError as error:
        raise BadEntry(f"the RLE cannot be read: {error}") from None
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise BadEntry("the RLE's counts are neither a list of non-negative integers nor a compressed string")
    if sum(runs) != image.height * image.width or not any(runs[1::2]):
        raise BadEntry(f"the RLE's runs do not fill the image of {image.width}×{image.height}, or its mask is empty")
    return {"size": [image.height, image.width], "counts": counts}


def rle_runs(text: str) -> list[int]:
    """Decode the runs of a compressed RLE string: six bits per character, differences after the second run.

    pycocotools is not used, because its C code does not validate the string.

    >>> rle_runs("52203")
    [5, 2, 2, 2, 5]
    """
    runs: list[int] = []
    value = shift = 0
    for character in text.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("it has invalid characters")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("it ends within a number")
    return runs
