"""A map of images: their features seen from the two directions in which they differ most (exact PCA)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.decode import Picture
from snclr.report.markup import escape, name, sheet_uri, visible

Array = npt.NDArray[np.float64]

WIDTH, HEIGHT, EDGE = 1000, 620, 16
COLOURS = 12
"""Classes with a colour of their own, the most frequent first; nobody tells more apart."""
TILE = 32
"""Pixels of a picture on the sheet that the pointer uncovers."""
_NAME = 120


@dataclass(frozen=True)
class EmbeddingMap:
    """Places (n, 2) of images, their names, and classes (None: unknown; no list where there are none at all)."""

    places: Array
    explained: tuple[float, float]
    """The share of all variance that each of the two directions has."""
    keys: list[str]
    classes: list[str | None] | None
    tiles: Picture | None
    """(n, TILE, TILE, 3), or None where there are no pictures to show."""
    protocol: str


def project(features: npt.ArrayLike) -> tuple[Array, tuple[float, float]]:
    """PCA of (n, d) to (n, 2), and the shares of the variance of both directions.

    Exact and repeatable: an eigenvalue problem in float64; a direction's sign makes its largest weight positive.

    >>> places, shares = project([[0.0, 3.0], [0.0, -3.0], [1.0, 0.0], [-1.0, 0.0]])
    >>> places.tolist(), [round(share, 3) for share in shares]
    ([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]], [0.9, 0.1])
    """
    centred = np.asarray(features, np.float64)
    centred = centred - centred.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    axes = np.zeros((centred.shape[1], 2))
    width = min(2, centred.shape[1])
    axes[:, :width] = vectors[:, ::-1][:, :width]
    heaviest = axes[np.abs(axes).argmax(axis=0), [0, 1]]
    axes *= np.where(heaviest < 0, -1.0, 1.0)
    total = float(values.sum())
    shares = [max(0.0, float(value)) / total if total > 1e-20 else 0.0 for value in [*values[::-1][:2], 0.0][:2]]
    return centred @ axes + 0.0, (shares[0], shares[1])


def draw_map(found: EmbeddingMap) -> tuple[str, dict[str, Any]]:
    """The map as HTML, and what its script needs: names, classes, and the sheet of small pictures."""
    spots, (numbers, legend) = _spots(found.places), _colours(found.classes, len(found.keys))
    dots = "".join(
        f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{_label(found, row)}</title></circle>'
        for row, ((x, y), number) in enumerate(zip(spots.tolist(), numbers, strict=True))
    )
    count = len(found.keys)
    words = f"Map of {count:,} images" + (f", coloured by {len(legend)} classes" if legend else "")
    html = (
        f'<div class="map"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">{dots}</svg>'
        '<div class="tip" hidden><div class="shot"></div><p></p></div></div>'
        f"{_legend(legend)}<p class=protocol>{escape(found.protocol, 1000)}</p>"
    )
    columns = max(1, int(np.ceil(np.sqrt(count))))
    data = {
        "names": [visible(key, _NAME) for key in found.keys],
        "classes": None if found.classes is None else [None if one is None else visible(one) for one in found.classes],
        "sheet": None if found.tiles is None else sheet_uri(found.tiles, columns),
        "columns": columns,
        "tile": TILE,
    }
    return html, data


def _spots(places: Array) -> Array:
    """Places in the picture (n, 2), y upwards, with one scale for both directions: distances are not bent."""
    low, high = places.min(axis=0), places.max(axis=0)
    room = np.array([WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE])
    extent = np.maximum(high - low, 1e-12)
    scale = float((room / extent).min()) if (high > low).any() else 0.0
    middle = (low + high) / 2
    spots: Array = np.array([WIDTH, HEIGHT]) / 2 + (places - middle) * scale * np.array([1.0, -1.0])
    return spots


def _colours(classes: Sequence[str | None] | None, count: int) -> tuple[list[str], list[tuple[str, str, int]]]:
    """A colour for each image, and the legend: name, colour and number of images. "n" is the colour of the rest."""
    if classes is None:
        return ["0"] * count, []
    counts = Counter(one for one in classes if one is not None)
    ranked = sorted(counts, key=lambda one: (-counts[one], one))[:COLOURS]
    colour = {one: str(number) for number, one in enumerate(sorted(ranked))}
    rest = len(classes) - sum(counts[one] for one in ranked)
    legend = [(one, colour[one], counts[one]) for one in sorted(ranked)]
    others = len(counts) - len(ranked)
    if rest:
        legend.append((f"{others:,} other classes" if others else "no class", "n", rest))
    return [colour.get(one, "n") if one is not None else "n" for one in classes], legend


def _label(found: EmbeddingMap, row: int) -> str:
    own = None if found.classes is None else found.classes[row]
    return escape(found.keys[row], _NAME) + (f" · {escape(own)}" if own is not None else "")


def _legend(legend: Sequence[tuple[str, str, int]]) -> str:
    """Buttons that single a class out; without a script they are a legend all the same."""
    if not legend:
        return ""
    items = "".join(
        f'<li><button type="button" aria-pressed="false" data-colour="c{colour}"><svg viewBox="0 0 10 10" '
        f'aria-hidden="true"><circle class="c{colour}" cx="5" cy="5" r="5"/></svg>{name(words, 60)} '
        f"<small>{count:,}</small></button></li>"
        for words, colour, count in legend
    )
    return f'<ul class="legend">{items}</ul>'
