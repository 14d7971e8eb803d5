"""Neighbors as figures: the paper's, of queries with their neighbors and w, and that of the loss of one image."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from snclr.data.decode import RGBImage, load_or_none
from snclr.evaluation.results import ExplainedTerm, Explanation, NeighborRow
from snclr.reports.figures.drawing import EDGE_COLORS, FAINT, GRID, image_grid, save_png, show_image
from snclr.reports.text import visible

_TERMS_PER_ROW = 6
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
    from matplotlib.patches import Patch

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
        edges = {True: "same class as the input", False: "another class"}
        handles = [
            Patch(facecolor="white", edgecolor=EDGE_COLORS[same], linewidth=2, label=edges[same]) for same in edges
        ]
        figure.legend(handles=handles, loc="lower left", ncols=2, frameon=False, fontsize=9)
    save_png(figure, path)


def draw_explanation(
    explanation: Explanation, load: Callable[[ExplainedTerm], RGBImage | None], path: Path | str
) -> None:
    """Write an image and its neighbors in the loss, each with cosine, w, p and its share of the loss as a bar.

    `load` gives the image of a term, None if it cannot be read."""
    query = explanation.terms[0]
    title = f"loss {explanation.loss:.3f} of one direction, {explanation.form} form"
    labeled = query.label is not None and any(term.label is not None for term in explanation.terms[1:])
    colors = "; green: same class, red: another class" if labeled else ""
    rows, columns = -(-len(explanation.terms) // _TERMS_PER_ROW), min(_TERMS_PER_ROW, len(explanation.terms))
    figure, axes = image_grid(
        rows, columns, side=1.9, caption=0.8, title=f"{title}; candidates: {explanation.candidates}{colors}"
    )  # fmt: skip
    for axis, term in zip(axes.flat, explanation.terms, strict=False):
        if term is query:
            edge, caption = None, f"the image (y2)\np = {term.p:.3f}   share {term.share:.1%}"
        else:
            edge = EDGE_COLORS[None if None in (query.label, term.label) else term.label == query.label]
            caption = f"w = {term.w:.3f}   p = {term.p:.3f}\ncosine {term.cosine:.3f}   share {term.share:.1%}"
        show_image(axis, load(term), caption, edge=edge)
        axis.xaxis.labelpad = 16  # room for the bar
        bar = axis.inset_axes((0, -0.1, 1, 0.04), xlim=(0, 1), xticks=[], yticks=[], facecolor=GRID)
        bar.spines[:].set_visible(False)
        bar.axvspan(0, term.share, color="#2f6fb3", linewidth=0)
    save_png(figure, path)
