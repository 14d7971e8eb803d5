"""What the figures share: matplotlib figures without pyplot, colors, a grid of images, and PNG output."""

import io
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.decode import RGBImage
from snclr.io.atomic import write_atomic
from snclr.reports.thumbnails import center_square

INK, FAINT, GRID = "#1d232b", "#6b7480", "#e7eaee"
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""The colorblind-safe palette of Okabe and Ito, without black."""
EDGE_COLORS = {True: "#1f9d57", False: "#d6453d", None: "#c9ced6"}
"""Edge of a neighbor: same class, another class, unknown."""
_GAP, _HEADING, _LEGEND = 0.24, 0.62, 0.3  # inches
_PIXELATED_BELOW = 96  # smaller images are enlarged without smoothing


def new_figure(width: float, height: float, **options: Any) -> Any:
    """Return a matplotlib figure of a size in inches, independent of pyplot and its global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", **options)


def save_png(figure: Any, path: Path | str) -> None:
    """Write a figure to PNG atomically; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font lacks some scripts and draws boxes instead
        figure.savefig(buffer, format="png", dpi=figure.dpi, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


def image_grid(rows: int, columns: int, *, title: str = "", side: float = 1.6, caption: float = 0.6) -> tuple[Any, Any]:
    """Return a figure and its axes (rows, columns): squares of `side` inches with room for a caption below each."""
    lines = textwrap.wrap(title, int(columns * 13 * side))
    top = _HEADING + 0.22 * len(lines)
    width, height = columns * (side + _GAP) + _GAP, top + rows * (side + caption) + _LEGEND
    figure = new_figure(width, height, dpi=100)
    figure.text(
        _GAP / width, 1 - 0.2 / height, "\n".join(lines), va="top", fontsize=11.5, color=INK, parse_math=False
    )  # fmt: skip
    axes = figure.subplots(
        rows, columns, squeeze=False,
        gridspec_kw={
            "left": _GAP / width, "right": 1 - _GAP / width, "top": 1 - top / height,
            "bottom": (caption + _LEGEND) / height, "wspace": _GAP / side, "hspace": caption / side,
        },
    )  # fmt: skip
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes


def show_image(axis: Any, image: RGBImage | None, caption: str, *, edge: str | None = None) -> None:
    """Draw the center square of an image with a caption and a colored edge; gray if the image cannot be read."""
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    # parse_math=False: a name with dollar signs is not a formula.
    axis.set_xlabel(caption, fontsize=10, color=INK, parse_math=False)
    axis.spines[:].set(edgecolor=edge or "none", linewidth=3)
    if image is None:
        image = np.full((1, 1, 3), 240, np.uint8)
        axis.text(0, 0, "cannot be read", ha="center", va="center", fontsize=9, color=FAINT)
    square = center_square(image)
    axis.imshow(square, interpolation="nearest" if len(square) < _PIXELATED_BELOW else "antialiased")
