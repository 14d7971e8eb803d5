from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snclr.data.decode import BadImage, Picture
from snclr.errors import UserError
from snclr.evaluate.neighbors import Neighbor, NeighborRow
from snclr.report.neighbor_figure import draw_neighbors, thumbnail

GREEN, RED = (31, 157, 87), (214, 69, 61)


def row(*same: bool | None, label: str | None = "frog") -> NeighborRow:
    found = [
        Neighbor(f"c/{i}", i, 0.9, 1.0 - i / 10, "frog" if value else "ship", value) for i, value in enumerate(same)
    ]
    return NeighborRow("q/7", 7, label, found)


def load(index: int) -> Picture:
    return np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def draw(tmp_path: Path, *rows: NeighborRow, **options: object) -> Picture:
    path = tmp_path / "neighbors.png"
    draw_neighbors(rows, load, load, path, **options)  # type: ignore[arg-type]
    assert [place.name for place in tmp_path.iterdir()] == ["neighbors.png"]  # nothing half-written is left
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def contains(picture: Picture, part: Picture) -> list[tuple[int, int]]:
    """Where `part` lies in `picture`, pixel for pixel."""
    views = np.lib.stride_tricks.sliding_window_view(picture[:, :, 0], part.shape[1], axis=1)
    places = np.argwhere((views == part[0, :, 0]).all(axis=2))
    return [
        (y, x) for y, x in places.tolist() if np.array_equal(picture[y : y + len(part), x : x + part.shape[1]], part)
    ]


def count(picture: Picture, colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(axis=2).sum())


def test_every_image_is_there_pixel_for_pixel(tmp_path: Path) -> None:
    picture = draw(tmp_path, row(True, False, None))
    inner = slice(10, -10)  # away from the rounded corners
    places = [contains(picture, thumbnail(load(index), 160)[inner, inner]) for index in (7, 0, 1, 2)]
    assert [len(found) for found in places] == [1, 1, 1, 1]
    (top, first), *others = [found[0] for found in places]
    assert all(y == top for y, _ in others)
    columns = [first, *(x for _, x in others)]
    assert columns == sorted(columns)  # the input, then the neighbours by rank


def test_small_images_keep_sharp_pixels() -> None:
    image = load(3)
    assert np.array_equal(thumbnail(image, 160), image.repeat(5, axis=0).repeat(5, axis=1))
    assert thumbnail(load(3)[:28, :20], 160).shape == (160, 160, 3)
    flat = np.full((300, 200, 3), 90, np.uint8)
    assert (thumbnail(flat, 160) == 90).all()
    assert (thumbnail(np.full((1, 1, 3), 90, np.uint8), 160) == 90).all()


def test_only_the_middle_square_is_shown() -> None:
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = 255
    assert (thumbnail(wide, 160) == 255).all()


def test_edges_say_whether_the_class_is_right(tmp_path: Path) -> None:
    right, wrong, unknown = (draw(tmp_path, row(value)) for value in (True, False, None))
    ring = 4 * 4 * 160  # a line of four pixels around the picture
    assert count(right, GREEN) > 0.95 * ring
    assert count(wrong, RED) > 0.95 * ring
    # What there is of the other colour is its place in the legend.
    assert count(right, RED) < 0.15 * ring
    assert count(wrong, GREEN) < 0.15 * ring
    assert count(unknown, GREEN) == count(unknown, RED) == 0


def test_ten_neighbours_and_rows_of_unequal_length(tmp_path: Path) -> None:
    five = draw(tmp_path, row(*[True] * 5))
    ten = draw(tmp_path, row(*[True] * 10), row(True, False), title="Neighbours")
    assert ten.shape[1] - five.shape[1] == 5 * (160 + 20)
    assert ten.shape[0] > five.shape[0] + 160


def test_a_query_without_any_neighbour_is_drawn(tmp_path: Path) -> None:
    assert contains(draw(tmp_path, row()), thumbnail(load(7), 160)[10:-10, 10:-10])


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    draw_neighbors([row(True)], load, load, tmp_path / "a.png")
    draw_neighbors([row(True)], load, load, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("label", ["$\\frac{1}$ $", "a_b^c", "蛙", "x" * 300, "two\nlines", None, ""])
def test_any_name_can_be_drawn(tmp_path: Path, label: str | None) -> None:
    assert draw(tmp_path, row(True, label=label), title=label).shape[0] > 160


def test_names_are_drawn(tmp_path: Path) -> None:
    frog, ship = (draw(tmp_path, row(True, label=label)) for label in ("frog", "ship"))
    assert not np.array_equal(frog, ship)
    heavy, light = (draw(tmp_path, NeighborRow("q", 7, None, [Neighbor("c", 0, 0.9, w)])) for w in (1.0, 0.5))
    assert not np.array_equal(heavy, light)


def test_an_image_that_went_bad_leaves_a_grey_tile(tmp_path: Path) -> None:
    def gone(index: int) -> Picture:
        raise BadImage("cannot be read: no such file")

    path = tmp_path / "neighbors.png"
    draw_neighbors([row(True)], load, gone, path)
    with Image.open(path) as image:
        assert count(np.asarray(image.convert("RGB")), (240, 240, 240)) > 0.8 * 160 * 160


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one query"):
        draw_neighbors([], load, load, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_pyplot_and_its_global_state_are_left_alone(tmp_path: Path) -> None:
    present = "matplotlib.pyplot" in sys.modules
    draw_neighbors([row(True)], load, load, tmp_path / "a.png")
    assert ("matplotlib.pyplot" in sys.modules) == present


def test_captions_show_w_or_the_cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snclr.report.neighbor_figure import _Sheet

    words: list[str] = []
    monkeypatch.setattr(_Sheet, "caption", lambda self, row, column, text, below: words.append(text))
    draw(tmp_path, row(True, False))
    draw(tmp_path, row(True, False), show="cosine")
    assert words == ["frog", "w₁ = 1.000", "w₂ = 0.900", "frog", "cosine 0.900", "cosine 0.900"]
