from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from snclr.reports.figures import comparison


def a_table(seeds: int, kind: str = "accuracy", title: str = "pets: 3 rows, 2 seeds") -> dict[str, Any]:
    metric = "seconds_per_step" if kind == "cost" else "knn"

    def row(label: str, mean: float) -> dict[str, Any]:
        cell = {"by_seed": dict.fromkeys(range(seeds), mean), "mean": mean, "sd": 0.01 if seeds > 1 else None}
        return {"label": label, "seeds": list(range(seeds)), metric: cell}

    rows = [row("snclr", 0.5), row("byol", 0.4), row("simclr", 0.7), {"label": "moco", "seeds": []}]
    return {"kind": kind, "title": title, "metrics": [metric], "rows": rows, "seeds": list(range(seeds))}


def drawn(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> Any:
    figures: list[Any] = []
    monkeypatch.setattr(comparison, "save_png", lambda figure, path: figures.append(figure))
    assert comparison.draw_comparison(table, Path("unused.png"))
    return figures[0]


def test_rows_are_sorted_and_the_reference_is_labeled(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, a_table(seeds=2))
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["simclr", "snclr", "byol"]
    assert [text.get_text() for text in axis.texts] == ["reference: snclr"]
    assert axis.lines[0].get_xdata() == [50.0, 50.0]
    assert axis.texts[0].get_position()[0] == 50.0
    points = axis.collections[0].get_offsets()
    assert points[:, 0].tolist() == pytest.approx([70.0, 50.0, 40.0])
    assert points[:, 1].tolist() == sorted(points[:, 1])
    assert figure.get_suptitle() == "pets: 3 rows, 2 seeds"
    assert axis.get_xlabel() == "kNN top-1 (%)"
    cost = drawn(monkeypatch, a_table(seeds=2, kind="cost", title="pets: seconds per step"))
    assert [label.get_text() for label in cost.axes[0].get_yticklabels()] == ["byol", "snclr", "simclr"]
    assert cost.get_suptitle() == "pets: seconds per step"
    assert cost.axes[0].get_xlabel() == "seconds per step"


def test_one_seed_has_no_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, a_table(seeds=1, title="pets: number of neighbors K"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["seed 0"]
    assert figure.get_suptitle() == "pets: number of neighbors K"
    several = drawn(monkeypatch, a_table(seeds=2))
    assert "mean ± standard deviation" in [text.get_text() for text in several.legends[0].get_texts()]


def test_the_curves_of_neighbors_have_their_labeled_chance_level(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(comparison, "save_png", lambda figure, path: figures.append(figure))
    study = {"title": "pets: 1 row", "seeds": [0], "rows": [{"label": "snclr"}]}
    series = {"epoch": [0, 1], "neighbor_purity": [0.3, 0.4], "queue_knn": [0.3, 0.5]}
    for chance in ({"neighbor_purity": 0.208, "queue_knn": 0.25}, {}):  # records of older studies have no levels
        assert comparison.draw_neighbor_purity({**study, "chance": chance}, [{0: {"series": series}}], "unused.png")
    with_levels, without = ([(axis.texts, axis.lines) for axis in figure.axes] for figure in figures)
    assert [[text.get_text() for text in texts] for texts, _ in with_levels] == [["chance 20.8%"], ["chance 25.0%"]]
    assert [lines[1].get_ydata()[0] for _, lines in with_levels] == pytest.approx([20.8, 25.0])
    high = {"neighbor_purity": 0.9}  # above every curve
    assert comparison.draw_neighbor_purity({**study, "chance": high}, [{0: {"series": series}}], "unused.png")
    assert figures.pop().axes[0].get_ylim()[1] > 90
    assert [(len(texts), len(lines)) for texts, lines in without] == [(0, 1), (0, 1)]
