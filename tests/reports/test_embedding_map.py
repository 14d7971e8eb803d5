from __future__ import annotations

import numpy as np
import pytest

from snclr.reports.embedding_map import COLORS, TILE, EmbeddingMap, build_map
from snclr.reports.text import visible
from tests.helpers.report_page import HOSTILE


def points(n: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, 2)) * [4.0, 1.0]


def tiles(n: int) -> np.ndarray:
    return np.zeros((n, TILE, TILE, 3), np.uint8)


def a_map(classes: list[str | None]) -> EmbeddingMap:
    n = len(classes)
    return build_map(points(n), [f"image {i}" for i in range(n)], classes, tiles(n), "protocol")


def test_dots_keep_the_aspect_ratio_of_the_points() -> None:
    dots = np.array([dot[:2] for dot in a_map(["a", "b"] * 20).dots])
    assert (dots >= 10).all()
    assert (dots <= [990, 610]).all()
    projected = points(40)
    scale = np.ptp(dots[:, 0]) / np.ptp(projected[:, 0])
    expected = (projected - projected[0]) * scale * [1, -1] + dots[0]
    assert dots == pytest.approx(expected, abs=0.3)


def test_dots_have_the_colors_of_the_legend() -> None:
    classes = ["cat", "dog", None, "cat", "ant"]
    view = a_map(classes)
    assert [color for _, _, color, _ in view.dots] == ["c1", "c2", "cn", "c1", "c0"]
    assert view.legend == [("ant", "c0", 1), ("cat", "c1", 2), ("dog", "c2", 1), ("no class", "cn", 1)]
    assert view.data["classes"] == classes
    assert view.data["names"] == [f"image {i}" for i in range(5)]


def test_rare_classes_share_a_color() -> None:
    classes: list[str | None] = [f"class {i:03d}" for i in range(40) for _ in range(1 + (i < COLORS))]
    view = a_map(classes)
    assert len(view.legend) == COLORS + 1
    assert view.legend[-1] == (f"{40 - COLORS} other classes", "cn", 40 - COLORS)
    assert [color for _, _, color, _ in view.dots].count("cn") == 40 - COLORS


def test_an_unlabeled_map_has_no_legend() -> None:
    view = a_map([None] * 7)
    assert [color for _, _, color, _ in view.dots] == ["c0"] * 7
    assert not view.legend
    assert view.data["classes"] == [None] * 7
    assert [title for *_, title in view.dots] == [f"image {i}" for i in range(7)]


def test_names_are_made_visible() -> None:
    view = build_map(points(len(HOSTILE)), HOSTILE, list(HOSTILE), tiles(len(HOSTILE)), "")
    assert [title for *_, title in view.dots] == [f"{visible(one)} · {visible(one)}" for one in HOSTILE]
    assert view.data["names"] == [visible(one) for one in HOSTILE]
