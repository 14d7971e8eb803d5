"""One image and the neighbours its loss is made of, each with cosine, w, p and its share as a bar."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.decode import Picture
from snclr.durable import write_atomic
from snclr.report.neighbor_figure import framed, thumbnail

# All lengths in pixels of the finished figure.
_CELL, _GAP, _CAPTION, _MARGIN, _TITLE, _DPI = 132, 18, 74, 26, 44, 100
_EDGE = 4  # of `framed`
_COLUMNS = 6
_INK, _FAINT, _PAPER, _BAR, _RAIL = "#1d232b", "#6b7480", "#ffffff", "#2f6fb3", "#e7eaee"
_EDGES = {True: "#1f9d57", False: "#d6453d", None: "#c9ced6"}


@dataclass(frozen=True)
class Tile:
    """A picture (None where it cannot be read) with two lines of text and a share in [0, 1]."""

    picture: Picture | None
    heading: str
    detail: str
    share: float
    same_class: bool | None = None


def draw_explanation(query: Tile, neighbors: Sequence[Tile], path: Path | str, *, title: str) -> None:
    """Write the figure (PNG): the image first, then its neighbours, six a row."""
    tiles = [query, *neighbors]
    rows = -(-len(tiles) // _COLUMNS)
    columns = min(_COLUMNS, len(tiles))
    width = 2 * _MARGIN + columns * _CELL + (columns - 1) * _GAP
    height = 2 * _MARGIN + _TITLE + rows * (_CELL + _CAPTION)
    figure = _blank(width, height)
    page = _Page(figure, width, height)
    page.text(_MARGIN, _MARGIN + 8, title, size=min(15.0, (width - 2 * _MARGIN) / (0.6 * len(title))), align="left")
    for number, tile in enumerate(tiles):
        row, column = divmod(number, _COLUMNS)
        x = _MARGIN + column * (_CELL + _GAP)
        page.tile(x, _MARGIN + _TITLE + row * (_CELL + _CAPTION), tile, query=number == 0)
    write_atomic(path, page.png())


def _blank(width: int, height: int) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    return figure


@dataclass
class _Page:
    """A matplotlib figure measured in pixels from its top left corner."""

    figure: Any
    width: int
    height: int

    def text(self, x: float, y: float, words: str, *, size: float, colour: str = _INK, align: str = "center") -> None:
        # parse_math off: a file name with a dollar sign is a name, not a formula.
        self.figure.text(
            x / self.width, 1 - y / self.height, words, ha=align, va="center", color=colour, fontfamily="DejaVu Sans",
            fontsize=size * 72 / _DPI, parse_math=False, usetex=False,
        )  # fmt: skip

    def tile(self, x: int, y: int, tile: Tile, *, query: bool) -> None:
        blank = np.full((1, 1, 3), 240, np.uint8)
        pixels = framed(thumbnail(blank if tile.picture is None else tile.picture, _CELL), _edge(tile, query))
        self.figure.figimage(pixels, x - _EDGE, self.height - y - _CELL - _EDGE)
        if tile.picture is None:
            self.text(x + _CELL / 2, y + _CELL / 2, "not at hand", size=12, colour=_FAINT)
        self.text(x + _CELL / 2, y + _CELL + 17, tile.heading, size=11.5)
        self.text(x + _CELL / 2, y + _CELL + 34, tile.detail, size=10.5, colour=_FAINT)
        self.bar(x, y + _CELL + 45, tile.share)

    def bar(self, x: int, y: int, share: float) -> None:
        rail = np.full((6, _CELL, 3), 0, np.uint8)
        filled = round(_CELL * min(max(share, 0.0), 1.0))
        rail[:, :filled] = _rgb(_BAR)
        rail[:, filled:] = _rgb(_RAIL)
        self.figure.figimage(rail, x, self.height - y - len(rail))

    def png(self) -> bytes:
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in a script the font lacks
            self.figure.savefig(buffer, format="png", dpi=_DPI, facecolor=_PAPER, metadata={"Software": None})
        return buffer.getvalue()


def _edge(tile: Tile, query: bool) -> str | None:
    return None if query else _EDGES[tile.same_class]


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
