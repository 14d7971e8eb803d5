from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_page import HOSTILE, Taken

from snclr.report.embedding_map import COLOURS, TILE, EmbeddingMap, draw_map, project
from snclr.report.markup import visible


def a_map(classes: list[str | None] | None, count: int | None = None, *, tiles: bool = True) -> EmbeddingMap:
    n = len(classes) if classes is not None else count or 5
    places = np.random.default_rng(0).normal(size=(n, 2)) * [4.0, 1.0]
    pictures = np.zeros((n, TILE, TILE, 3), np.uint8) if tiles else None
    return EmbeddingMap(places, (0.5, 0.2), [f"image {i}" for i in range(n)], classes, pictures, "as measured")


@given(st.integers(3, 40), st.integers(2, 12), st.integers(0, 9))
def test_the_projection_is_pca(rows: int, width: int, seed: int) -> None:
    features = np.random.default_rng(seed).normal(size=(rows, width)) * np.arange(1, width + 1)
    places, shares = project(features)
    centred = features - features.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    expected = left[:, :2] * values[:2]
    for axis in range(2):
        sign = np.sign(expected[:, axis] @ places[:, axis])
        assert places[:, axis] == pytest.approx(sign * expected[:, axis], abs=1e-6)
    assert shares == pytest.approx(tuple(values[:2] ** 2 / (values**2).sum()))


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_weight_of_a_direction_is_positive(seed: int) -> None:
    features = np.random.default_rng(seed).normal(size=(60, 5)) * [1, 2, 3, 4, 5]
    axes = np.linalg.pinv(features - features.mean(axis=0)) @ project(features)[0]
    assert (axes[np.abs(axes).argmax(axis=0), [0, 1]] > 0.1).all()


def test_the_projection_is_the_same_each_time_and_for_any_order_of_images() -> None:
    features = np.random.default_rng(1).normal(size=(200, 30)) * np.arange(1, 31)
    order = np.random.default_rng(2).permutation(200)
    first, again, mixed = project(features)[0], project(features)[0], project(features[order])[0]
    assert np.array_equal(first, again)
    assert mixed == pytest.approx(first[order], abs=1e-8)


@pytest.mark.parametrize("features", [np.ones((5, 4)), np.arange(5.0)[:, None], np.zeros((3, 1))])
def test_features_without_two_directions_have_a_map_all_the_same(features: np.ndarray) -> None:
    places, shares = project(features)
    assert places.shape == (len(features), 2)
    assert np.isfinite(places).all()
    assert all(0 <= share <= 1 + 1e-12 for share in shares)
    html, _ = draw_map(EmbeddingMap(places, shares, ["k"] * len(features), None, None, ""))
    assert all(np.isfinite(float(dot["cx"] or "")) for dot in Taken(html).all("circle"))


def test_dots_keep_the_shape_of_the_cloud() -> None:
    found = a_map(["a", "b"] * 20)
    html, _ = draw_map(found)
    dots = Taken(html).all("circle")[:40]
    spots = np.array([[float(dot["cx"] or ""), float(dot["cy"] or "")] for dot in dots])
    assert (spots >= 10).all()
    assert (spots <= [990, 610]).all()
    scale = np.ptp(spots[:, 0]) / np.ptp(found.places[:, 0])
    expected = (found.places - found.places[0]) * scale * [1, -1] + spots[0]
    assert spots == pytest.approx(expected, abs=0.3)


def test_colours_are_those_of_the_legend() -> None:
    classes = ["cat", "dog", None, "cat", "ant"]
    html, data = draw_map(a_map(classes))
    taken = Taken(html)
    colours = [dot["class"] for dot in taken.all("circle")[:5]]
    assert colours == ["c1", "c2", "cn", "c1", "c0"]
    assert [button["data-colour"] for button in taken.all("button")] == ["c0", "c1", "c2", "cn"]
    assert [text for tag, text in taken.texts if tag == "bdi"] == ["ant", "cat", "dog", "no class"]
    assert [text for tag, text in taken.texts if tag == "small"] == ["1", "2", "1", "1"]
    assert data["classes"] == classes
    assert data["names"] == [f"image {i}" for i in range(5)]


def test_many_classes_share_a_colour() -> None:
    classes: list[str | None] = [f"class {i:03d}" for i in range(40) for _ in range(1 + (i < COLOURS))]
    html, _ = draw_map(a_map(classes))
    assert len(Taken(html).all("button")) == COLOURS + 1
    assert f"{40 - COLOURS} other classes" in html
    assert len(Taken(html).all("circle", "cn")) == 40 - COLOURS + 1


def test_without_classes_there_is_no_legend() -> None:
    html, data = draw_map(a_map(None, 7, tiles=False))
    taken = Taken(html)
    assert len(taken.all("circle", "c0")) == 7
    assert not taken.all("button")
    assert data["classes"] is None
    assert data["sheet"] is None


def test_hostile_names_are_text() -> None:
    found = a_map(list(HOSTILE))
    html, data = draw_map(EmbeddingMap(found.places, (0.0, 0.0), list(HOSTILE), list(HOSTILE), None, HOSTILE[0]))
    taken = Taken(html)
    assert {tag for tag, _ in taken.elements} <= set("div svg circle title p ul li button bdi small".split())  # noqa: SIM905
    titles = [text for tag, text in taken.texts if tag == "title"]
    assert titles == [f"{visible(one)} · {visible(one)}" for one in HOSTILE]
    assert data["names"] == [visible(one) for one in HOSTILE]
