"""Where a COCO-format folder keeps its annotation files and its images: the usual places, tried in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from snclr.errors import UserError

# Names of the two parts, as folders and inside file names.
_PARTS = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_WHOLE = ("instances.json", "annotations.json", "_annotations.coco.json", "coco.json", "instances_default.json")


@dataclass(frozen=True)
class Layout:
    """The files of a data set. `val` None: there is one file, of which a part is held out."""

    train: Path
    val: Path | None
    folder: Path


def find_annotations(data: str | Path, train: str | Path | None = None, val: str | Path | None = None) -> Layout:
    """Find the annotation files of a folder; `train` and `val` say them outright (also relative to the folder).

    Tried are `annotations/` and the folder itself for instances_train*.json, then any *train*.json, then
    `train/_annotations.coco.json`; the same for val; at last one file for all.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise UserError(f"--data {folder} is not a folder; give one with COCO annotation files and images")
    found_train = _given(folder, train, "--train-annotations") if train else _search(folder, "train")
    found_val = _given(folder, val, "--val-annotations") if val else _search(folder, "val")
    if found_train is not None:
        if found_val is None and not train:
            raise UserError(
                f"{folder} has training annotations ({found_train.name}) and none for validation; "
                "give --val-annotations FILE"
            )
        return Layout(found_train, found_val, folder)
    whole = next((path for place in _places(folder) for name in _WHOLE if (path := place / name).is_file()), None)
    if whole is None:
        raise UserError(
            f"{folder} has no COCO annotation files: looked in {folder} and {folder / 'annotations'} for "
            "instances_train*.json, *train*.json and the same with val. Give --train-annotations and --val-annotations."
        )
    return Layout(whole, found_val, folder)


def find_images(layout: Layout, annotations: Path, names: Iterable[str], given: str | Path | None = None) -> Path:
    """The folder the images of an annotation file are in: the first place that has one of the first few names."""
    names = list(names)
    if given is not None:
        place = next((p for p in (Path(given), layout.folder / given) if p.is_dir()), None)
        if place is None:
            raise UserError(f"the image folder {given} does not exist")
        return place
    places = list(dict.fromkeys(_image_places(layout.folder, annotations)))
    for place in places:
        if any((place / name).is_file() for name in names[:20]):
            return place
    tried = ", ".join(str(place) for place in places if place.is_dir())
    raise UserError(
        f"the images of {annotations} were not found: {names[0] if names else 'it has no images'} is in none of "
        f"{tried}. Give --images FOLDER (and --val-images where they are apart)."
    )


def _places(folder: Path) -> tuple[Path, ...]:
    return (folder / "annotations", folder)


def _search(folder: Path, part: str) -> Path | None:
    """The annotation file of a part, or None; two that fit equally well are an error."""
    for word in _PARTS[part]:
        for pattern in (f"instances_{word}*.json", f"{word}*.json", f"*{word}*.json"):
            for place in _places(folder):
                found = sorted(p for p in place.glob(pattern) if p.is_file() and _is_part(p, part, word))
                if len(found) > 1:
                    names = ", ".join(path.name for path in found[:4])
                    raise UserError(f"{place} has several files for {part}: {names}. Give --{part}-annotations FILE.")
                if found:
                    return found[0]
        for name in _WHOLE:
            if (folder / word / name).is_file():
                return folder / word / name
    return None


def _is_part(path: Path, part: str, word: str) -> bool:
    """Leave out other kinds of annotation (captions, keypoints, panoptic) and names of the other part."""
    name = path.stem.lower()
    if any(kind in name for kind in ("caption", "keypoint", "panoptic", "stuff", "image_info")):
        return False
    others = [other for key, words in _PARTS.items() if key != part for other in words]
    return not (any(other in name for other in others) and not name.startswith((word, f"instances_{word}")))


def _image_places(folder: Path, annotations: Path) -> Iterable[Path]:
    stem = annotations.stem
    tag = stem.removeprefix("instances_")
    plain = tag.rstrip("0123456789_-")
    for name in (tag, plain, *_PARTS.get(plain, ())):
        yield folder / name
        yield folder / "images" / name
        yield folder / f"{name}_images"
    yield annotations.parent
    yield folder / "images"
    yield annotations.parent / "images"
    yield folder / "JPEGImages"
    yield folder


def _given(folder: Path, path: str | Path, flag: str) -> Path:
    for candidate in (Path(path), folder / path):
        if candidate.is_file():
            return candidate
    raise UserError(f"{flag} {path} is not a file, neither as it stands nor in {folder}")
