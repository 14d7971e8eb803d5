"""Annotations anyone may have written: every fault is found before training and reported with file, id and reason.

What cannot be used is left out; a box that reaches over the edge is clipped. Nothing is guessed silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from snclr.json_values import is_number

_EDGE = 1.0  # boxes may reach this many pixels over the edge without a word: labelling tools round


@dataclass(frozen=True)
class Fault:
    """Something wrong with an annotation file's entry, and what was done about it."""

    file: str
    kind: str
    """"image", "annotation" or "category"."""
    id: int | str | None
    reason: str
    action: str = "left out"

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} {self.id}: {self.reason} ({self.action})"


class BadEntry(Exception):
    """An entry that cannot be used; the message is the reason."""


@dataclass(frozen=True)
class CocoImage:
    """An image of the set; the name is relative to the image folder."""

    id: int | str
    name: str
    width: int
    height: int


@dataclass(frozen=True)
class CocoObject:
    """An object: box (x, y, width, height) in pixels, its mask as polygons or RLE, and its category's id."""

    id: int | str | None
    category: int
    box: tuple[float, float, float, float]
    segmentation: Any
    area: float
    crowd: bool


def check_image(entry: Any) -> CocoImage:
    """The image an entry describes, or BadEntry."""
    if not isinstance(entry, dict):
        raise BadEntry("the entry is not an object")
    key, name = entry.get("id"), entry.get("file_name")
    if not _is_id(key):
        raise BadEntry(f"id is {key!r}, not a number")
    if not isinstance(name, str) or not name:
        raise BadEntry(f"file_name is {name!r}")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
        raise BadEntry(f"file_name {name!r} leads out of the image folder")
    width, height = entry.get("width"), entry.get("height")
    if not (_is_count(width) and _is_count(height)):
        raise BadEntry(f"width and height are {width!r} and {height!r}, not whole numbers above 0")
    assert isinstance(key, int | str) and isinstance(width, int) and isinstance(height, int)  # noqa: PT018
    return CocoImage(key, name, width, height)


def check_object(
    entry: Mapping[str, Any], image: CocoImage, categories: Mapping[int, str]
) -> tuple[CocoObject, str | None]:
    """The object an annotation describes, and what was clipped (or None); BadEntry where it cannot be used."""
    category = entry.get("category_id")
    if not isinstance(category, int) or category not in categories:
        raise BadEntry(f"category id {category!r} is unknown")
    box, clipped = _check_box(entry.get("bbox"), image)
    crowd = entry.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise BadEntry(f"iscrowd is {crowd!r}, neither 0 nor 1")
    segmentation = check_segmentation(entry.get("segmentation"), image)
    area, key = entry.get("area"), entry.get("id")
    if not isinstance(area, int | float) or not (is_number(area) and area > 0):
        area = box[2] * box[3]
    return CocoObject(key if _is_id(key) else None, category, box, segmentation, float(area), bool(crowd)), clipped


def _check_box(box: Any, image: CocoImage) -> tuple[tuple[float, float, float, float], str | None]:
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        raise BadEntry(f"bbox is {_short(box)}, not four finite numbers")
    x, y, width, height = (float(value) for value in box)
    if width <= 0 or height <= 0:
        raise BadEntry(f"bbox {_short(box)} has no area")
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, float(image.width)), min(y + height, float(image.height))
    if right <= left or bottom <= top:
        raise BadEntry(f"bbox {_short(box)} lies outside the image of {image.width}×{image.height}")
    over = max(left - x, top - y, x + width - right, y + height - bottom)
    words = f"bbox {_short(box)} reaches outside the image of {image.width}×{image.height}" if over > _EDGE else None
    return (left, top, right - left, bottom - top), words


def check_segmentation(value: Any, image: CocoImage) -> Any:
    """Polygons as they are, or an RLE as {"size", "counts"} whose runs are known to fill the image exactly."""
    if value is None:
        raise BadEntry("there is no segmentation")
    if isinstance(value, dict):
        return _check_rle(value, image)
    if not isinstance(value, list) or not value:
        raise BadEntry("the polygon is empty")
    for polygon in value:
        if not isinstance(polygon, list) or not polygon:
            raise BadEntry("the polygon is empty")
        if len(polygon) < 6 or len(polygon) % 2 or not all(map(is_number, polygon)):
            raise BadEntry(f"a polygon of {len(polygon)} values: needed are three or more points of finite x and y")
    xs = [x for polygon in value for x in polygon[0::2]]
    ys = [y for polygon in value for y in polygon[1::2]]
    if max(xs) <= 0 or max(ys) <= 0 or min(xs) >= image.width or min(ys) >= image.height:
        raise BadEntry(f"the polygon lies outside the image of {image.width}×{image.height}")
    if max(xs) - min(xs) <= 0 or max(ys) - min(ys) <= 0:
        raise BadEntry("the polygon has no area")
    return [[float(number) for number in polygon] for polygon in value]


def _check_rle(value: dict[str, Any], image: CocoImage) -> dict[str, Any]:
    size = value.get("size")
    if size != [image.height, image.width]:
        raise BadEntry(f"the RLE is of size {_short(size)}; the image is [{image.height}, {image.width}]")
    counts = value.get("counts")
    try:
        runs = rle_runs(counts) if isinstance(counts, str) else counts
    except (ValueError, UnicodeError) as error:
        raise BadEntry(f"the RLE cannot be read: {error}") from None
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise BadEntry("the RLE's counts are neither a list of whole numbers nor a compressed string")
    if (filled := sum(runs)) != image.height * image.width:
        said = f"{filled} pixels" if is_number(filled) else "more pixels than can be counted"
        raise BadEntry(f"the RLE's runs have {said}; the image has {image.height * image.width}")
    if not any(runs[1::2]):
        raise BadEntry("the RLE's mask is empty")
    return {"size": [image.height, image.width], "counts": counts}


def rle_runs(text: str) -> list[int]:
    """The runs of a compressed RLE string: six bits a character, each run after the second as a difference.

    Decoded here rather than by pycocotools: its C code takes the string on trust.

    >>> rle_runs("52203")
    [5, 2, 2, 2, 5]
    """
    runs: list[int] = []
    value = shift = 0
    for character in text.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("it has characters that no RLE has")
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


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value > 0


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
