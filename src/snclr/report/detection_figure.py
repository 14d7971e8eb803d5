"""Drawn predictions: each image twice, with its annotated objects and with those that were found."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.decode import Picture
from snclr.durable import write_atomic
from snclr.errors import UserError

# Lengths in pixels of the finished figure.
_WIDTH = 420
_GAP, _PAIR_GAP, _MARGIN = 8, 30, 24
_HEADING, _CAPTION, _TITLE = 26, 30, 40
_PAIRS = 2  # side by side
_DPI = 100
_OPACITY = 0.45
_FONT = "DejaVu Sans"
_INK, _FAINT, _PAPER = "#1d232b", "#6b7480", "#ffffff"
# Told apart by people with any colour vision, on photographs: Okabe and Ito's set without black.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Drawn:
    """An object to draw: box (x, y, width, height) and mask (H, W) in the image's pixels."""

    name: str
    score: float | None
    box: tuple[float, float, float, float]
    mask: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class DrawnImage:
    """An image with its annotated and its found objects."""

    key: str
    picture: Picture
    truth: Sequence[Drawn]
    found: Sequence[Drawn]


def draw_detections(images: Sequence[DrawnImage], path: Path | str, *, title: str, score: float) -> None:
    """Write the figure to `path` (PNG): annotated at the left, found at the right (with a score of `score` or more)."""
    if not images:
        raise UserError("there are no images to draw; give --draw a number above 0")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [round(_WIDTH * image.picture.shape[0] / image.picture.shape[1]) for image in images]
    pairs = min(_PAIRS, len(images))
    rows = [range(first, min(first + pairs, len(images))) for first in range(0, len(images), pairs)]
    tallest = [max(heights[number] for number in row) for row in rows]
    width = 2 * _MARGIN + pairs * (2 * _WIDTH + _GAP) + (pairs - 1) * _PAIR_GAP
    height = _MARGIN + _TITLE + sum(_HEADING + tall + _CAPTION for tall in tallest) + _MARGIN // 2
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    page = _Page(figure, width, height)
    page.text(_MARGIN, _MARGIN + 8, title, size=17, weight="bold")
    top = _MARGIN + _TITLE
    for row, tall in zip(rows, tallest, strict=True):
        for place, number in enumerate(row):
            left = _MARGIN + place * (2 * _WIDTH + _GAP + _PAIR_GAP)
            image = images[number]
            page.text(left, top + 10, f"annotated ({len(image.truth)})", size=14, colour=_FAINT)
            shown = f"found ({len(image.found)} with a score of {score:g} or more)"
            page.text(left + _WIDTH + _GAP, top + 10, shown, size=14, colour=_FAINT)
            page.picture(left, top + _HEADING, heights[number], image.picture, image.truth)
            page.picture(left + _WIDTH + _GAP, top + _HEADING, heights[number], image.picture, image.found)
            page.text(left, top + _HEADING + heights[number] + 14, _shorten(image.key), size=13, style="italic")
        top += _HEADING + tall + _CAPTION
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


@dataclass
class _Page:
    """A matplotlib figure measured in pixels from its top left corner."""

    figure: Any
    width: int
    height: int

    def text(
        self, x: float, y: float, words: str, *, size: float, colour: str = _INK, weight: str = "normal",
        style: str = "normal",
    ) -> None:  # fmt: skip
        self.figure.text(
            x / self.width, 1 - y / self.height, words, ha="left", va="center", color=colour, fontfamily=_FONT,
            fontsize=size * 72 / _DPI, fontweight=weight, fontstyle=style, parse_math=False, usetex=False,
        )  # fmt: skip

    def picture(self, left: int, top: int, tall: int, picture: Picture, objects: Sequence[Drawn]) -> None:
        """The image with masks laid over, boxes, and names with scores."""
        from matplotlib.patches import Rectangle

        place = (left / self.width, 1 - (top + tall) / self.height, _WIDTH / self.width, tall / self.height)
        axes = self.figure.add_axes(place)
        axes.set_axis_off()
        axes.imshow(blend(picture, objects), interpolation="antialiased", aspect="auto")
        for number, drawn in enumerate(objects):
            x, y, width, height = drawn.box
            colour = _COLOURS[number % len(_COLOURS)]
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), width, height, fill=False, edgecolor=colour, linewidth=1.6))
            words = drawn.name if drawn.score is None else f"{drawn.name} {drawn.score:.2f}"
            axes.text(
                x, max(y, 0), words, color="black", fontsize=10 * 72 / _DPI, fontfamily=_FONT, va="bottom",
                parse_math=False, clip_on=True,
                bbox={"facecolor": colour, "alpha": 0.85, "pad": 1.0, "edgecolor": "none"},
            )  # fmt: skip
        axes.set_xlim(-0.5, picture.shape[1] - 0.5)
        axes.set_ylim(picture.shape[0] - 0.5, -0.5)


def blend(picture: Picture, objects: Sequence[Drawn]) -> Picture:
    """The picture with each object's mask laid over it in the object's colour, the first object uppermost."""
    result = picture.astype(np.float32)
    for number in reversed(range(len(objects))):
        colour = _COLOURS[number % len(_COLOURS)]
        rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=np.float32)
        inside = objects[number].mask.astype(bool)
        result[inside] = picture[inside] * (1 - _OPACITY) + rgb * _OPACITY
    return np.rint(result).astype(np.uint8)


def _shorten(words: str, most: int = 60) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"
