from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snclr.reports.curves import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    METRICS,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    build_charts,
    describe_lines,
    downsample,
    read_series,
    smooth,
)

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


def records(values: list[Any], name: str = "loss") -> list[dict[str, Any]]:
    return [{"step": 10 * n, "epoch": n / 4, name: value} for n, value in enumerate(values, start=1)]


def chart_of(values: list[Any], name: str = "loss") -> Chart:
    (chart,) = build_charts(records(values, name))
    return chart


def lines_of(path: str) -> list[list[tuple[float, float]]]:
    """Return the connected lines of a path in viewBox units."""
    parts = [part.replace("l0 0", "").split("L") for part in path.split("M")[1:]]
    return [[(float(x), float(y)) for x, y in (pair.split() for pair in part)] for part in parts]


def values_of(line: list[tuple[float, float]], low: float, high: float) -> list[float]:
    """Return the values of a line from its heights, if its lowest point is `low` and its highest `high`."""
    heights = [-y for _, y in line]
    extent = max(heights) - min(heights) or 1.0
    return [low + (height - min(heights)) / extent * (high - low) for height in heights]


@given(st.lists(NUMBERS, min_size=1, max_size=50))
def test_the_curve_goes_through_the_logged_values(values: list[float]) -> None:
    chart = chart_of(values)
    (line,) = lines_of(chart.path)
    steps = np.arange(1, len(values) + 1)
    assert [x for x, _ in line] == pytest.approx(LEFT + steps / len(values) * (WIDTH - LEFT - RIGHT), abs=0.01)
    assert values_of(line, min(values), max(values)) == pytest.approx(values, abs=0.001 * (max(values) - min(values)))
    assert list(zip(chart.points["x"], chart.points["y"], strict=True)) == [pytest.approx(p, abs=0.01) for p in line]
    assert chart.points["value"] == [pytest.approx(value, rel=1e-5) for value in values]
    assert chart.points["step"] == [10 * n for n in range(1, len(values) + 1)]
    for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", chart.path):
        assert LEFT - 0.01 <= float(x) <= WIDTH - RIGHT + 0.01
        assert TOP - 0.01 <= float(y) <= HEIGHT - BOTTOM + 0.01
    assert all(TOP - 0.01 <= y <= HEIGHT - BOTTOM + 0.01 for y, _ in chart.y_ticks)
    assert len(chart.y_ticks) <= 5
    assert len(chart.x_ticks) <= 6


def test_the_smoothed_line_is_the_mean_over_the_stated_window() -> None:
    values = [float(n % 7) for n in range(605)]
    chart = chart_of(values)
    (line,) = lines_of(chart.smoothed_path)
    assert len(line) == 60
    expected = [sum(values[10 * n : 10 * n + 10]) / 10 for n in range(60)]
    assert values_of(line, min(expected), max(expected)) == pytest.approx(expected, abs=0.05)
    assert smooth(*read_series(records(values), METRICS[0])[1:])[1] == pytest.approx(expected)  # type: ignore[index]
    assert "mean over 10 logged steps" in describe_lines([chart])
    assert "Bold" not in describe_lines([chart_of(values[:100])])


@given(st.lists(NUMBERS | st.none(), min_size=1, max_size=600), st.integers(4, 100))
def test_downsampling_keeps_ends_extremes_and_order(values: list[float | None], max_points: int) -> None:
    kept = downsample(np.array([np.nan if value is None else value for value in values]), max_points)
    assert kept == sorted(set(kept))
    assert {0, len(values) - 1} <= set(kept)
    assert len(kept) <= max(max_points * 1.5 + 2, len(values) if len(values) <= max_points else 0)
    finite = [value for value in values if value is not None]
    if finite:
        drawn = [values[index] for index in kept if values[index] is not None]
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))  # type: ignore[type-var]


def test_a_long_run_is_downsampled_and_keeps_its_spike() -> None:
    values = [1.0 + n % 3 for n in range(100_000)]
    values[54_321] = 99.0
    chart = chart_of(values)
    points = chart.points
    assert len(points["value"]) <= 1.5 * MAX_POINTS + 2
    assert max(points["value"]) == 99.0
    assert points["step"][points["value"].index(99.0)] == 543_220
    assert "highest 99" in chart.aria_label


def test_non_finite_values_are_gaps_and_counted() -> None:
    chart = chart_of([3.0, 2.0, None, 4.0, "x", True, 5.0])
    lines = lines_of(chart.path)
    assert [len(line) for line in lines] == [2, 1, 1]
    points = [point for line in lines for point in line]
    assert values_of(points, 2.0, 5.0) == pytest.approx([3.0, 2.0, 4.0, 5.0], abs=0.01)
    assert chart.points["value"] == [3.0, 2.0, None, 4.0, None, None, 5.0]
    assert chart.caption.endswith("not finite (gaps): 3")


def test_metrics_that_were_not_logged_have_no_chart() -> None:
    lines = [{"step": 1, "epoch": 0.5, "loss": 2.0}, {"step": 2, "epoch": "x", "loss": 1.0}, {"step": 3, "loss": 9.0}]
    (chart,) = build_charts(lines)
    assert chart.metric.name == "loss"
    assert chart.points["value"] == [2.0]
    assert build_charts([]) == []
    assert build_charts([{"step": 1, "epoch": 1, "loss": None}]) == []


def test_shares_start_at_zero_and_are_shown_in_percent() -> None:
    chart = chart_of([0.25, 0.5], "same_class")
    assert chart.y_ticks[0] == (HEIGHT - BOTTOM, "0 %")
    assert chart.last == "50.0%"
    assert chart.points["share"] is True


def test_timings_are_read() -> None:
    line = {"step": 1, "epoch": 1.0, "loss": 1.0, "timing": {"images_per_second": 120.0}}
    _, chart = build_charts([line])
    assert chart.points["value"] == [120.0]
