"""A map of images: dots at given points, with a color per class."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.decode import RGBImage
from snclr.reports.text import visible
from snclr.reports.thumbnails import sprite_uri

Array = npt.NDArray[np.float64]

WIDTH, HEIGHT, MARGIN = 1000, 620, 16
COLORS = 12
"""Classes with a color of their own, the most frequent ones; more are hard to distinguish."""
TILE = 32
"""Pixels of the thumbnail shown next to the pointer."""
_MAX_NAME = 120


@dataclass(frozen=True)
class EmbeddingMap:
    """What the template draws: dots (x, y, color, title) and legend (name, color, count), and data for the script."""

    dots: list[tuple[float, float, str, str]]
    legend: list[tuple[str, str, int]]
    data: dict[str, Any]
    """Names and classes (None if unknown) of the images; `sprite`, a data URI of their thumbnails or None."""
    protocol: str


def build_map(
    points: Array, keys: Sequence[str], classes: Sequence[str | None], tiles: RGBImage, protocol: str
) -> EmbeddingMap:
    """Draw points (N, 2) as dots with a color per class; `tiles` are thumbnails (N, TILE, TILE, 3)."""
    colors, legend = _colors(classes)
    names = [visible(key, _MAX_NAME) for key in keys]
    labels = [None if label is None else visible(label, 200) for label in classes]
    titles = [name if label is None else f"{name} · {label}" for name, label in zip(names, labels, strict=True)]
    columns = max(1, int(np.ceil(np.sqrt(len(names)))))
    x, y = _positions(points).T.tolist()
    return EmbeddingMap(
        list(zip(x, y, colors, titles, strict=True)), legend,
        {"names": names, "classes": labels, "columns": columns, "sprite": sprite_uri(tiles, columns)}, protocol,
    )  # fmt: skip


def _positions(points: Array) -> Array:
    """Scale both axes equally into the viewBox (N, 2), y upwards."""
    low, high = points.min(axis=0), points.max(axis=0)
    available = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])
    scale = float((available / np.maximum(high - low, 1e-12)).min()) if (high > low).any() else 0.0
    return np.asarray(np.array([WIDTH, HEIGHT]) / 2 + (points - (low + high) / 2) * scale * np.array([1.0, -1.0]))


def _colors(classes: Sequence[str | None]) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Return a color class per image and the legend; "cn" is the color of all other images. No labels, no legend."""
    counts = Counter(label for label in classes if label is not None)
    if not counts:
        return ["c0"] * len(classes), []
    frequent = sorted(sorted(counts, key=lambda label: (-counts[label], label))[:COLORS])
    color = {label: f"c{number}" for number, label in enumerate(frequent)}
    legend = [(label, color[label], counts[label]) for label in frequent]
    if rest := len(classes) - sum(counts[label] for label in frequent):
        others = len(counts) - len(frequent)
        legend.append((f"{others:,} other classes" if others else "no class", "cn", rest))
    return ["cn" if label is None else color.get(label, "cn") for label in classes], legend
