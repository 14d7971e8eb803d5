"""One image and its neighbors in the loss, each with cosine, w, p and its share of the loss as a bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snclr.data.decode import RGBImage
from snclr.evaluation.results import ExplainedTerm, Explanation
from snclr.reports.figures.drawing import EDGE_COLORS, GRID, image_grid, save_png, show_image

_COLUMNS = 6


def draw_explanation(
    explanation: Explanation, load: Callable[[ExplainedTerm], RGBImage | None], path: Path | str
) -> None:
    """Write the figure of an explanation (PNG); `load` gives the image of a term, None if it cannot be read."""
    query = explanation.terms[0]
    title = f"loss {explanation.loss:.3f} of one direction, {explanation.form} form"
    figure, axes = image_grid(
        -(-len(explanation.terms) // _COLUMNS), min(_COLUMNS, len(explanation.terms)), side=1.9, caption=0.8,
        title=f"{title}; candidates: {explanation.candidates}",
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
