"""Validate COCO annotations: an unusable entry is left out with a reason; boxes are clipped to their image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from snclr.io.jsonl import is_finite_number

_MAX_SIDE = 2**31  # pixels


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
