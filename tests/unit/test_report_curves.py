from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_page import Taken

from snclr.report.curves import (
    BOTTOM,
    HEIGHT,
    LEFT,
    METRICS,
    MORE_METRICS,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    draw_all,
    line_words,
    means,
    read_series,
    thin,
    ticks,
)  # fmt: skip

LOSS = METRICS[0]
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


def records(values: list[Any], name: str = "loss") -> list[dict[str, Any]]:
    return [{"step": 10 * n, "epoch": n / 4, name: value} for n, value in enumerate(values, start=1)]


def points(path: str, svg: dict[str, str | None]) -> list[list[tuple[float, float]]]:
    """The lines of a path, in the units of the axes."""
    x0, x1, y0, y1 = (float(svg[f"data-{end}"] or "") for end in ("x0", "x1", "y0", "y1"))
    lines = []
    for part in path.split("M")[1:]:
        pairs = [pair.split() for pair in re.split("L", part.replace("l0 0", ""))]
        lines.append([
            (
                x0 + (float(x) - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0),
                y0 + (HEIGHT - BOTTOM - float(y)) / (HEIGHT - TOP - BOTTOM) * (y1 - y0),
            )
            for x, y in pairs
        ])  # fmt: skip
    return lines


def drawn(html: str, kind: str = "raw") -> list[list[tuple[float, float]]]:
    taken = Taken(html)
    (path,) = taken.all("path", kind)
    return points(path["d"] or "", taken.all("svg")[0])


@given(st.lists(NUMBERS, min_size=1, max_size=50))
def test_the_curve_lies_where_the_numbers_are(values: list[float]) -> None:
    html, data = draw_all(records(values), [LOSS])
    (line,) = drawn(html)
    height = max(values) - min(values) or abs(values[0]) or 1.0
    assert [x for x, _ in line] == pytest.approx([n / 4 for n in range(1, len(values) + 1)], abs=0.01 * len(values))
    assert [y for _, y in line] == pytest.approx(values, abs=0.001 * height)
    assert data["loss"]["value"] == [pytest.approx(value, rel=1e-5) for value in values]
    assert data["loss"]["step"] == [10 * n for n in range(1, len(values) + 1)]
    for x, y in (pair for pair in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", html)):
        assert LEFT - 0.01 <= float(x) <= WIDTH - RIGHT + 0.01
        assert TOP - 0.01 <= float(y) <= HEIGHT - BOTTOM + 0.01


def test_the_bold_line_is_the_mean_that_is_stated() -> None:
    values = [float(n % 7) for n in range(605)]
    html, _ = draw_all(records(values), [LOSS])
    (line,) = drawn(html, "mean")
    assert len(line) == 60
    expected = [sum(values[10 * n : 10 * n + 10]) / 10 for n in range(60)]
    assert [y for _, y in line] == pytest.approx(expected, abs=0.05)
    assert means(read_series(records(values), LOSS))[1] == pytest.approx(expected)  # type: ignore[arg-type]
    assert "means of 10 logged steps" in line_words(records(values), [LOSS])
    assert "Bold" not in line_words(records(values[:100]), [LOSS])


@given(st.lists(NUMBERS | st.none(), min_size=1, max_size=600), st.integers(4, 100))
def test_thinning_keeps_ends_extremes_and_order(values: list[float | None], most: int) -> None:
    places = thin(values, most)
    assert places == sorted(set(places))
    assert {0, len(values) - 1} <= set(places)
    assert len(places) <= max(most * 1.5 + 2, len(values) if len(values) <= most else 0)
    known = [value for value in values if value is not None]
    if known:
        kept = [values[place] for place in places if values[place] is not None]
        assert (min(kept), max(kept)) == (min(known), max(known))  # type: ignore[type-var]


def test_a_long_run_is_thinned_on_the_page_and_keeps_its_spike() -> None:
    values = [1.0 + n % 3 for n in range(100_000)]
    values[54_321] = 99.0
    html, data = draw_all(records(values), [LOSS])
    assert len(data["loss"]["value"]) <= 1.5 * MOST_POINTS + 2
    assert max(data["loss"]["value"]) == 99.0
    assert data["loss"]["step"][data["loss"]["value"].index(99.0)] == 543_220
    assert "highest 99" in html


def test_values_that_are_not_finite_are_gaps_and_counted() -> None:
    html, data = draw_all(records([3.0, 2.0, None, 4.0, "x", True, 5.0]), [LOSS])
    assert [[round(y, 2) for _, y in line] for line in drawn(html)] == [[3.0, 2.0], [4.0], [5.0]]
    assert data["loss"]["value"] == [3.0, 2.0, None, 4.0, None, None, 5.0]
    assert "3 values were not finite" in html


def test_what_was_not_logged_is_not_drawn() -> None:
    lines = [{"step": 1, "epoch": 0.5, "loss": 2.0}, {"step": 2, "epoch": "x", "loss": 1.0}, {"step": 3, "loss": 9.0}]
    html, data = draw_all(lines, METRICS)
    assert list(data) == ["loss"]
    assert data["loss"]["value"] == [2.0]
    assert html.count("<figure") == 1
    assert draw_all([], METRICS) == ("", {})
    assert draw_all([{"step": 1, "epoch": 1, "loss": None}], METRICS) == ("", {})


def test_shares_start_at_nought_and_are_printed_in_per_cent() -> None:
    html, data = draw_all(records([0.25, 0.5], "same_class"), METRICS)
    (svg,) = Taken(html).all("svg")
    assert float(svg["data-y0"] or "") == 0
    assert "<output>50.0%</output>" in html
    assert data["same_class"]["share"] is True


def test_clock_readings_are_found() -> None:
    line = {"step": 1, "epoch": 1.0, "loss": 1.0, "timing": {"images_per_second": 120.0}}
    assert draw_all([line], MORE_METRICS)[1]["images_per_second"]["value"] == [120.0]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert len(found) <= 6
    slack = 1e-8 * (width + abs(low))
    assert all(low - slack <= value <= low + width + slack for value in found)
    assert found == sorted(found)
