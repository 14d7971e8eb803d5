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
    last_values,
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


def axis_of(chart: Chart) -> tuple[float, float]:
    """Return the lowest and the highest value of the y-axis, from two of its ticks."""
    (y0, first), (y1, last) = chart.y_ticks[0], chart.y_ticks[-1]
    slope = (float(last) - float(first)) / (y1 - y0)
    return float(first) + (HEIGHT - BOTTOM - y0) * slope, float(first) + (TOP - y0) * slope


@given(st.lists(NUMBERS, min_size=2, max_size=50))
def test_the_curve_goes_through_the_logged_values(values: list[float]) -> None:
    chart = chart_of(values)
    (drawn,) = chart.lines
    (line,) = lines_of(drawn.path)
    steps = np.arange(1, len(values) + 1)
    assert [x for x, _ in line] == pytest.approx(LEFT + steps / len(values) * (WIDTH - LEFT - RIGHT), abs=0.01)
    largest = max(map(abs, values))
    assert values_of(line, min(values), max(values)) == pytest.approx(values, abs=0.002 * largest)
    assert list(zip(drawn.points["x"], drawn.points["y"], strict=True)) == [pytest.approx(p, abs=0.01) for p in line]
    assert drawn.points["value"] == [pytest.approx(value, rel=1e-5) for value in values]
    assert drawn.points["step"] == [10 * n for n in range(1, len(values) + 1)]
    for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", drawn.path):
        assert LEFT - 0.01 <= float(x) <= WIDTH - RIGHT + 0.01
        assert TOP - 0.01 <= float(y) <= HEIGHT - BOTTOM + 0.01
    assert all(TOP - 0.01 <= y <= HEIGHT - BOTTOM + 0.01 for y, _ in chart.y_ticks)
    assert len(chart.y_ticks) <= 5
    assert len(chart.x_ticks) <= 6


def test_the_smoothed_line_is_the_mean_over_the_stated_window() -> None:
    values = [float(n % 7) for n in range(605)]
    chart = chart_of(values)
    (line,) = lines_of(chart.lines[0].smoothed_path)
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
    points = chart.lines[0].points
    assert len(points["value"]) <= 1.5 * MAX_POINTS + 2
    assert max(points["value"]) == 99.0
    assert points["step"][points["value"].index(99.0)] == 543_220
    assert "highest 99" in chart.aria_label


def test_non_finite_values_are_gaps_and_counted() -> None:
    chart = chart_of([3.0, 2.0, None, 4.0, "x", True, 5.0])
    lines = lines_of(chart.lines[0].path)
    assert [len(line) for line in lines] == [2, 1, 1]
    points = [point for line in lines for point in line]
    assert values_of(points, 2.0, 5.0) == pytest.approx([3.0, 2.0, 4.0, 5.0], abs=0.01)
    assert chart.lines[0].points["value"] == [3.0, 2.0, None, 4.0, None, None, 5.0]
    assert chart.caption.endswith("not finite (gaps): 3")


def test_metrics_that_were_not_logged_have_no_chart() -> None:
    lines = [
        {"step": 1, "epoch": 0.5, "loss": 2.0}, {"step": 2, "epoch": "x", "loss": 1.0}, {"step": 3, "loss": 9.0},
        {"step": 4, "epoch": 1.5, "loss": 1.0},
    ]  # fmt: skip
    (chart,) = build_charts(lines)
    assert chart.metric.name == "loss"
    assert chart.lines[0].points["value"] == [2.0, 1.0]
    assert build_charts([]) == []
    assert build_charts([{"step": 1, "epoch": 1, "loss": None}]) == []


def test_shares_start_at_zero_and_are_shown_in_percent() -> None:
    chart = chart_of([0.25, 0.5], "neighbor_purity")
    assert chart.y_ticks[0] == (HEIGHT - BOTTOM, "0 %")
    assert chart.last == "50.0%"


def test_timings_are_read() -> None:
    lines = [{"step": n, "epoch": 1.0 * n, "timing": {"images_per_second": 120.0 + n}} for n in (1, 2)]
    (chart,) = build_charts(lines)
    assert chart.lines[0].points["value"] == [121.0, 122.0]


def test_a_metric_with_one_value_has_no_chart() -> None:
    lines = [{"step": 1, "epoch": 0.5, "loss": 2.0, "spread": 0.9}, {"step": 2, "epoch": 1.0, "loss": 1.0}]
    assert [chart.metric.name for chart in build_charts(lines)] == ["loss"]
    assert {name: value for name, (_, value) in last_values(lines).items()} == {"loss": "1", "spread": "0.9"}


@pytest.mark.parametrize(("name", "span"), [("loss", 0.8), ("spread", 0.2), ("neighbor_cosine", 0.2)])
def test_a_tiny_change_looks_tiny(name: str, span: float) -> None:
    value = 8.0 if name == "loss" else 0.9
    chart = chart_of([value, value * 1.001, value], name)
    low, high = axis_of(chart)
    assert high - low == pytest.approx(span, rel=0.02)
    heights = [y for _, y in lines_of(chart.lines[0].path)[0]]
    assert max(heights) - min(heights) < 0.02 * HEIGHT


def test_the_axis_ends_at_the_largest_possible_value() -> None:
    low, high = axis_of(chart_of([0.998, 0.999], "positiveness_entropy"))
    assert (low, high) == pytest.approx((0.804, 1.004), abs=1e-3)


def test_the_chance_level_is_a_labeled_line_within_the_axis() -> None:
    (chart,) = build_charts(records([0.1, 0.2], "neighbor_purity"), chance={"neighbor_purity": 0.5})
    assert chart.reference is not None
    y, label_y, label = chart.reference
    ((_, first), (_, last)) = lines_of(chart.lines[0].path)[0]
    assert y == pytest.approx(last + 3 * (last - first), abs=0.05)  # 0.5 = 0.2 + 3 × (0.2 - 0.1)
    assert TOP <= y < label_y < HEIGHT - BOTTOM
    assert label == "chance 50.0%"
    assert chart.aria_label.endswith("chance 50.0%")
    (plain,) = build_charts(records([1.0, 2.0]), chance={"neighbor_purity": 0.5})
    assert plain.reference is None


def test_few_values_are_drawn_as_dots() -> None:
    assert chart_of([3.0, None, 2.0]).lines[0].dots.count("M") == 2
    assert chart_of([1.0, 2.0] * 50).lines[0].dots == ""


def test_runs_are_drawn_in_one_chart() -> None:
    first, second = records([1.0, 2.0]), records([4.0, 3.0, 0.0, 1.0])
    (chart,) = build_charts(first, [], second)
    assert [line.run for line in chart.lines] == [0, 2]
    assert [line.points["value"] for line in chart.lines] == [[1.0, 2.0], [4.0, 3.0, 0.0, 1.0]]
    ends = [lines_of(line.path)[0][-1][0] for line in chart.lines]
    assert ends == pytest.approx([(LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT], abs=0.01)  # epochs 0.5 and 1
    assert (chart.last, "2 runs" in chart.aria_label) == ("", True)
