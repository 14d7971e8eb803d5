from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from snclr.data.decode import BadImage, RGBImage
from snclr.evaluation.results import Neighbor, NeighborRow
from snclr.reports.figures import neighbors as module
from snclr.reports.figures.drawing import EDGE_COLORS, save_png
from snclr.reports.figures.neighbors import LoadImage, draw_neighbors


def row(*same: bool | None, label: str | None = "frog") -> NeighborRow:
    neighbors = [
        Neighbor(f"c/{i}", i, 0.9, 1.0 - i / 10, "frog" if value else "ship", value) for i, value in enumerate(same)
    ]
    return NeighborRow("q/7", 7, label, neighbors)


def load(index: int) -> RGBImage:
    return np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def draw(tmp_path: Path, *rows: NeighborRow, load_candidate: LoadImage = load, **options: Any) -> Figure:
    """Draw the figure to a file, and return the matplotlib figure."""
    saved = []
    path = tmp_path / "neighbors.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_png", lambda figure, path: (saved.append(figure), save_png(figure, path)))
        draw_neighbors(rows, load, load_candidate, path, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["neighbors.png"]  # no temporary file is left
    with Image.open(path) as image:
        assert image.format == "PNG"
    return saved[0]


def shown(figure: Figure) -> list[Any]:
    """The axes with an image, in reading order."""
    return [axis for axis in figure.axes if axis.images]


def edge(axis: Any) -> str:
    return to_hex(axis.spines["top"].get_edgecolor(), keep_alpha=True)


def test_each_row_has_the_query_and_its_neighbors_in_order(tmp_path: Path) -> None:
    axes = shown(draw(tmp_path, row(True, False, None)))
    assert all(
        np.array_equal(axis.images[0].get_array(), load(index)) for axis, index in zip(axes, (7, 0, 1, 2), strict=True)
    )
    assert [axis.images[0].get_interpolation() for axis in axes] == ["nearest"] * 4  # small images stay sharp
    assert [axis.get_xlabel() for axis in axes] == ["frog", "w₁ = 1.000", "w₂ = 0.900\nship", "w₃ = 0.800"]


def test_the_center_square_of_an_image_is_shown(tmp_path: Path) -> None:
    wide = np.zeros((200, 600, 3), np.uint8)
    wide[:, 200:400] = 255
    axis = shown(draw(tmp_path, row(True), load_candidate=lambda index: wide))[1]
    assert (axis.images[0].get_array() == 255).all()
    assert axis.images[0].get_interpolation() == "antialiased"


def test_edge_colors_show_whether_the_class_matches(tmp_path: Path) -> None:
    figure = draw(tmp_path, row(True, False, None))
    query, *neighbors = [edge(axis) for axis in shown(figure)]
    assert query.endswith("00")  # transparent
    assert neighbors == [f"{EDGE_COLORS[same]}ff" for same in (True, False, None)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["same class as the input", "another class"]
    assert not draw(tmp_path, row(None)).legends


def test_rows_may_have_unequal_length_or_no_neighbors(tmp_path: Path) -> None:
    figure = draw(tmp_path, row(*[True] * 10), row(True, False), row(), title="Neighbors")
    assert len(shown(figure)) == 11 + 3 + 1
    assert len(shown(draw(tmp_path, row()))) == 1


def test_the_figure_is_deterministic(tmp_path: Path) -> None:
    draw_neighbors([row(True)], load, load, tmp_path / "a.png")
    draw_neighbors([row(True)], load, load, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("label", ["$\\frac{1}$ $", "a_b^c", "蛙", "x" * 300, "two\nlines", None, ""])
def test_unusual_names_can_be_drawn(tmp_path: Path, label: str | None) -> None:
    assert shown(draw(tmp_path, row(True, label=label), title=label))


def test_an_unreadable_image_is_a_gray_tile(tmp_path: Path) -> None:
    def fail(index: int) -> RGBImage:
        raise BadImage("cannot be read: no such file")

    axis = shown(draw(tmp_path, row(True), load_candidate=fail))[1]
    assert (axis.images[0].get_array() == 240).all()
    assert [text.get_text() for text in axis.texts] == ["cannot be read"]


def test_pyplot_is_not_imported(tmp_path: Path) -> None:
    present = "matplotlib.pyplot" in sys.modules
    draw_neighbors([row(True)], load, load, tmp_path / "a.png")
    assert ("matplotlib.pyplot" in sys.modules) == present


def test_captions_show_w_or_the_cosine(tmp_path: Path) -> None:
    for show, caption in (("w", "w₁ = 1.000"), ("cosine", "cosine 0.900")):
        assert shown(draw(tmp_path, row(True), show=show))[1].get_xlabel() == caption
