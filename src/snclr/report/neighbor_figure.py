"""The paper's neighbour figure: an input a row, its nearest neighbours beside it, each with its positiveness w."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from snclr.data.decode import BadImage, Picture
from snclr.durable import write_atomic
from snclr.errors import UserError
from snclr.evaluate.neighbors import Neighbor, NeighborRow

Load = Callable[[int], Picture]

# All lengths in pixels of the finished figure: whole numbers keep the pixels of small images sharp.
_CELL = 160
_GAP = 20
_INPUT_GAP = 42  # sets the input apart from its neighbours
_CAPTION = 58
_ROW = _CELL + _CAPTION
_HEADING = 38
_TITLE = 36
_LEGEND = 34
_MARGIN = 26
_EDGE = 4
_CORNER = 3
_SMALL = 96  # images below this are shown pixel by pixel
_DPI = 100

_INK, _FAINT, _PAPER = "#1d232b", "#6b7480", "#ffffff"
_SAME, _OTHER, _NEUTRAL = "#1f9d57", "#d6453d", "#c9ced6"
_FONT = "DejaVu Sans"  # comes with matplotlib, so it is there everywhere
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw_neighbors(
    rows: Sequence[NeighborRow],
    load_query: Load,
    load_candidate: Load,
    path: Path | str,
    *,
    title: str | None = None,
    show: Literal["w", "cosine"] = "w",
) -> None:
    """Write the figure to `path` (PNG). The two functions give an image, uint8 (H, W, 3), for an index of the rows.

    Under each neighbour stands its w, or, where `show` says so, its cosine.

    A green edge marks a neighbour of the input's class, a red one another class, a grey one an unknown class.
    """
    if not rows:
        raise UserError("there are no rows to draw; choose at least one query image")
    columns = max(1, *(len(row.neighbors) for row in rows))
    known = any(found.same_class is not None for row in rows for found in row.neighbors)
    sheet = _Sheet.blank(len(rows), columns, title=title, legend=known)
    for number in range(columns + 1):
        sheet.heading(number, "Input" if number == 0 else f"Neighbour {number}")
    for number, row in enumerate(rows):
        sheet.picture(number, 0, _load(load_query, row.index), edge=None)
        sheet.caption(number, 0, row.label or row.key, "")
        for rank, found in enumerate(row.neighbors, start=1):
            sheet.picture(number, rank, _load(load_candidate, found.index), edge=_edge_colour(found))
            other = found.label if found.same_class is False and found.label else ""
            value = f"w{str(rank).translate(_SUBSCRIPTS)} = {found.w:.3f}"
            sheet.caption(number, rank, value if show == "w" else f"cosine {found.cosine:.3f}", other)
    write_atomic(path, sheet.png())


@dataclass
class _Sheet:
    """A matplotlib figure measured in pixels from its top left corner."""

    figure: Any
    width: int
    height: int
    top: int

    @classmethod
    def blank(cls, rows: int, columns: int, *, title: str | None, legend: bool) -> _Sheet:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        top = _MARGIN + (_TITLE if title else 0) + _HEADING
        width = 2 * _MARGIN + _CELL + _INPUT_GAP + columns * _CELL + (columns - 1) * _GAP
        height = top + rows * _ROW + (_LEGEND if legend else 0) + _MARGIN // 2
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
        FigureCanvasAgg(figure)
        sheet = cls(figure, width, height, top)
        if title:
            fits = (width - 2 * _MARGIN) / (0.7 * len(title))  # a letter is about 0.7 of its size wide
            sheet.text(_MARGIN, _MARGIN + 8, title, size=min(17.0, fits), weight="bold", align="left")
        if legend:
            sheet.legend()
        return sheet

    def left(self, column: int) -> int:
        return _MARGIN if column == 0 else _MARGIN + _CELL + _INPUT_GAP + (column - 1) * (_CELL + _GAP)

    def text(
        self, x: float, y: float, words: str, *, size: float, colour: str = _INK, weight: str = "normal",
        style: str = "normal", align: str = "center",
    ) -> None:  # fmt: skip
        # parse_math off: a file or class name with a dollar sign is a name, not a formula.
        self.figure.text(
            x / self.width, 1 - y / self.height, words, ha=align, va="center", color=colour, fontfamily=_FONT,
            fontsize=size * 72 / _DPI, fontweight=weight, fontstyle=style, parse_math=False, usetex=False,
        )  # fmt: skip

    def heading(self, column: int, words: str) -> None:
        self.text(self.left(column) + _CELL / 2, self.top - _HEADING / 2 - 2, words, size=15, colour=_FAINT)

    def caption(self, row: int, column: int, words: str, below: str) -> None:
        x, y = self.left(column) + _CELL / 2, self.top + row * _ROW + _CELL
        style = "italic" if column == 0 else "normal"
        self.text(x, y + 19, _shorten(words, 18), size=15, style=style)
        if below:
            self.text(x, y + 38, _shorten(below, 22), size=12, colour=_OTHER)

    def picture(self, row: int, column: int, picture: Picture | None, edge: str | None) -> None:
        x, y = self.left(column), self.top + row * _ROW
        self.tile(x, y, _CELL, np.full((1, 1, 3), 240, np.uint8) if picture is None else picture, edge)
        if picture is None:
            self.text(x + _CELL / 2, y + _CELL / 2, "cannot be read", size=13, colour=_FAINT)

    def tile(self, x: float, y: float, side: int, picture: Picture, edge: str | None) -> None:
        # Placed pixel by pixel: axes would be resampled by a fraction of one, and small images would lose their edges.
        pixels = framed(thumbnail(picture, side), edge)
        self.figure.figimage(pixels, round(x) - _EDGE, self.height - round(y) - side - _EDGE)

    def legend(self) -> None:
        x: float = self.left(1) if self.width > 700 else _MARGIN
        y = self.height - _MARGIN // 2 - _LEGEND / 2
        for colour, words in ((_SAME, "same class as the input"), (_OTHER, "another class")):
            self.tile(x, y - 5, 10, np.full((1, 1, 3), 255, np.uint8), colour)
            self.text(x + 20, y, words, size=13, colour=_FAINT, align="left")
            x += 20 + 7.6 * len(words) + 32

    def png(self) -> bytes:
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # A class name in a script the font lacks is drawn as boxes; that is no reason to stop.
            warnings.filterwarnings("ignore", message="Glyph")
            self.figure.savefig(buffer, format="png", dpi=_DPI, facecolor=_PAPER, metadata={"Software": None})
        return buffer.getvalue()


def thumbnail(picture: Picture, side: int) -> Picture:
    """The middle square of a picture as (side, side, 3); small pictures keep sharp pixels.

    >>> thumbnail(np.zeros((32, 48, 3), np.uint8), 160).shape
    (160, 160, 3)
    """
    height, width, _ = picture.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    image = Image.fromarray(np.ascontiguousarray(picture[top : top + short, left : left + short]))
    if short < _SMALL:
        # A whole number of times first, so that all pixels are equally large; then down to fit, if it did not.
        enlarged = short * -(-side // short)
        image = image.resize((enlarged, enlarged), Image.Resampling.NEAREST)
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def framed(picture: Picture, edge: str | None) -> Picture:
    """A picture (S, S, 3) with rounded corners inside a coloured edge: (S + 2E, S + 2E, 3)."""
    side = len(picture)
    sheet = Image.new("RGB", (side + 2 * _EDGE, side + 2 * _EDGE), _PAPER)
    if edge is not None:
        sheet.paste(edge, (0, 0), _rounded(sheet.width, _CORNER + _EDGE))
    sheet.paste(Image.fromarray(picture), (_EDGE, _EDGE), _rounded(side, _CORNER))
    return np.asarray(sheet)


def _rounded(side: int, radius: int) -> Image.Image:
    """A mask of a square with rounded corners, drawn large and scaled down so that they are smooth."""
    mask = Image.new("L", (4 * side, 4 * side), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, 4 * side - 1, 4 * side - 1), 4 * radius, fill=255)
    return mask.resize((side, side), Image.Resampling.BOX)


def _load(load: Load, index: int) -> Picture | None:
    try:
        return load(index)
    except BadImage:  # readable when its features were computed, gone or damaged since
        return None


def _edge_colour(found: Neighbor) -> str:
    if found.same_class is None:
        return _NEUTRAL
    return _SAME if found.same_class else _OTHER


def _shorten(words: str, most: int) -> str:
    """Cut long names in front: the end of a path says more than its beginning.

    >>> _shorten("holiday/2019/june/img_0001.jpg", 18)
    '…june/img_0001.jpg'
    """
    words = " ".join(words.split())
    return words if len(words) <= most else "…" + words[1 - most :]
