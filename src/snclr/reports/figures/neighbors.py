"""The paper's neighbor figure: one query per row, followed by its nearest neighbors with their positiveness w."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from snclr.data.decode import RGBImage, load_or_none
from snclr.evaluation.results import NeighborRow
from snclr.reports.figures.drawing import EDGE_COLORS, FAINT, image_grid, save_png, show_image
from snclr.reports.text import visible

LoadImage = Callable[[int], RGBImage]
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw_neighbors(
    rows: Sequence[NeighborRow],
    load_query: LoadImage,
    load_candidate: LoadImage,
    path: Path | str,
    *,
    title: str | None = None,
    show: Literal["w", "cosine"] = "w",
) -> None:
    """Write the figure to `path` (PNG); the two functions return the image (H, W, 3) of an index of the rows.

    `show` selects the number under each neighbor. Edges are green for the query's class, red for another class and
    gray for an unknown one.
    """
    columns = max(1, *(len(row.neighbors) for row in rows))
    figure, axes = image_grid(len(rows), columns + 1, title=title or "")
    for column, axis in enumerate(axes[0]):
        axis.set_title(f"Neighbor {column}" if column else "Input", fontsize=11, color=FAINT)
    for row, (query_axis, *neighbor_axes) in zip(rows, axes, strict=True):
        show_image(query_axis, load_or_none(load_query, row.index), visible(row.label or row.key, 18))
        for rank, (axis, neighbor) in enumerate(zip(neighbor_axes, row.neighbors, strict=False), start=1):
            weight = f"w{str(rank).translate(_SUBSCRIPTS)} = {neighbor.w:.3f}"
            caption = weight if show == "w" else f"cosine {neighbor.cosine:.3f}"
            if neighbor.same_class is False and neighbor.label:
                caption += f"\n{visible(neighbor.label, 20)}"
            image = load_or_none(load_candidate, neighbor.index)
            show_image(axis, image, caption, edge=EDGE_COLORS[neighbor.same_class])
    if any(neighbor.same_class is not None for row in rows for neighbor in row.neighbors):
        _draw_legend(figure)
    save_png(figure, path)


def _draw_legend(figure: object) -> None:
    from matplotlib.patches import Patch

    edges = {True: "same class as the input", False: "another class"}
    handles = [Patch(facecolor="white", edgecolor=EDGE_COLORS[same], linewidth=2, label=edges[same]) for same in edges]
    figure.legend(handles=handles, loc="lower left", ncols=2, frameon=False, fontsize=9)  # type: ignore[attr-defined]
