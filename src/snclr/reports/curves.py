"""Training curves: the metrics of metrics.jsonl as charts, ready for the SVG template."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from snclr.io.jsonl import is_finite_number
from snclr.reports.text import format_number

Array = npt.NDArray[np.float64]
Series = tuple[list[int], Array, Array]
"""Steps, epochs and values of a metric."""

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 32
"""Margins around the plot area, in units of the viewBox."""
MAX_POINTS = 400
"""Points per curve; more than there are pixels."""
SMOOTHED_POINTS = 60
"""Points of the smoothed line. It is drawn if at least twice as many values were logged."""
MAX_DOTS = 20
"""Most values of a curve that are also drawn as dots, to show how few there are."""


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl with its title and description."""

    name: str
    title: str
    description: str
    share: bool = False
    """Whether values are shown in percent, on an axis from 0."""
    noisy: bool = True
    """Whether to draw a smoothed line over the logged values."""
    min_span: float | None = None
    """Smallest extent of the y-axis, so that a change of 0.1 % looks small; None: a tenth of the largest value."""
    largest: float | None = None
    """Largest possible value, if there is one: the y-axis ends there."""

    def format(self, value: float) -> str:
        """Format a value: shares as percent."""
        return f"{value:.1%}" if self.share else format_number(value)


_TEXT = files("snclr.reports").joinpath("metrics.yaml").read_text(encoding="utf-8")
METRICS = tuple(Metric(name, **fields) for name, fields in yaml.safe_load(_TEXT).items())
"""All metrics that are drawn, in the order of their charts."""


@dataclass(frozen=True)
class Line:
    """The curve of one run: SVG paths in viewBox units, and the points for the script."""

    run: int
    """Position of the run on the page."""
    path: str
    dots: str
    """A path of dots, one per value; empty with many values."""
    smoothed_path: str
    window: int
    """Values per point of the smoothed line."""
    points: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Chart:
    """One chart: its lines, and ticks (position, label)."""

    metric: Metric
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    last: str
    """The last value; empty with several runs."""
    caption: str
    aria_label: str
    reference: tuple[float, float, str] | None = None
    """The chance level, if known: positions of its line and of its label, and the label."""


def build_charts(*runs: Sequence[dict[str, Any]], chance: Mapping[str, float] | None = None) -> list[Chart]:
    """Build a chart with a line per run for every metric with a curve: two finite values or more in some run.

    All charts share the epoch axis. `chance` has the chance levels by the name of the metric.
    """
    logged: dict[Metric, dict[int, Series]] = {}
    for metric in METRICS:
        series = {number: one for number, records in enumerate(runs) if (one := read_series(records, metric))}
        if any(np.isfinite(values).sum() > 1 for _, _, values in series.values()):
            logged[metric] = series
    last_epoch = max((float(epochs[-1]) for by_run in logged.values() for _, epochs, _ in by_run.values()), default=0.0)
    x_range = (0.0, last_epoch) if last_epoch > 0 else (-0.5, 0.5)
    levels = chance or {}
    return [_chart(metric, by_run, x_range, levels.get(metric.name)) for metric, by_run in logged.items()]


def last_values(records: Sequence[dict[str, Any]]) -> dict[str, tuple[Metric, str]]:
    """Return every logged metric by name with its last finite value, as text."""
    logged = ((metric, read_series(records, metric)) for metric in METRICS)
    return {m.name: (m, m.format(s[2][np.isfinite(s[2])][-1])) for m, s in logged if s is not None}


def read_series(records: Sequence[dict[str, Any]], metric: Metric) -> Series | None:
    """Return steps, epochs and values of a metric, NaN for a value that is not finite; None if no value is finite."""
    steps, epochs, values = [], [], []
    for record in records:
        timing = record.get("timing")
        source = timing if isinstance(timing, dict) and metric.name in timing else record
        if metric.name in source and all(is_finite_number(record.get(name)) for name in ("step", "epoch")):
            value = source[metric.name]
            steps.append(int(record["step"]))
            epochs.append(float(record["epoch"]))
            values.append(float(value) if is_finite_number(value) else np.nan)
    return (steps, np.array(epochs), np.array(values)) if np.isfinite(values).any() else None


def downsample(values: Array, max_points: int = MAX_POINTS) -> list[int]:
    """Return indices of about `max_points` values: the minimum, the maximum and any gap (NaN) of each bucket.

    >>> downsample(np.array([5.0, 1.0, 9.0, 3.0, 4.0, 2.0]), max_points=4)
    [0, 1, 2, 4, 5]
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    size = -(-count // max(1, max_points // 2))
    kept = {0, count - 1}
    for start in range(0, count, size):
        bucket = values[start : start + size]
        gaps = np.isnan(bucket)
        kept.update((start + np.flatnonzero(gaps)[:1]).tolist())
        if not gaps.all():
            kept |= {start + int(np.nanargmin(bucket)), start + int(np.nanargmax(bucket))}
    return sorted(kept)


def smooth(epochs: Array, values: Array) -> tuple[Array, Array, int]:
    """Return epochs and means of consecutive windows, and the window size; empty with too few values."""
    pairs = np.stack([epochs, values])[:, np.isfinite(values)]
    size = pairs.shape[1] // SMOOTHED_POINTS
    if size < 2:
        return np.empty(0), np.empty(0), 1
    windows = pairs[:, : pairs.shape[1] // size * size].reshape(2, -1, size).mean(axis=2)
    return windows[0], windows[1], size


def describe_lines(charts: Sequence[Chart]) -> str:
    """Explain the thin and bold lines of the charts."""
    if sizes := sorted({line.window for chart in charts for line in chart.lines if line.smoothed_path}):
        window = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        text = f"Thin: logged steps. Bold: mean over {window} logged steps."
        return text + (" The number is the last logged value." if any(chart.last for chart in charts) else "")
    return "Every logged step, over epochs."


def _chart(
    metric: Metric, by_run: dict[int, Series], x_range: tuple[float, float], chance: float | None = None
) -> Chart:
    every = np.concatenate([values for _, _, values in by_run.values()])
    finite = every[np.isfinite(every)]
    low, high = float(finite.min()), float(finite.max())
    shown = (low, high) if chance is None else (min(low, chance), max(high, chance))
    y_range = _y_range(metric, *shown)

    def x_of(epochs: Any) -> Any:
        return np.interp(epochs, x_range, (LEFT, WIDTH - RIGHT))

    def y_of(values: Any) -> Any:
        return np.interp(values, y_range, (HEIGHT - BOTTOM, TOP))

    def label(value: float) -> str:
        return f"{value * 100:.4g} %" if metric.share else f"{value:.6g}"

    def line(run: int, steps: list[int], epochs: Array, values: Array) -> Line:
        kept = downsample(values)
        smoothed = smooth(epochs, values) if metric.noisy else (np.empty(0), np.empty(0), 1)
        points = {"epoch": epochs[kept], "value": values[kept], "x": x_of(epochs[kept]), "y": y_of(values[kept])}
        return Line(
            run, _path(points["x"], points["y"]),
            _path(points["x"], points["y"], connect=False) if len(kept) <= MAX_DOTS else "",
            _path(x_of(smoothed[0]), y_of(smoothed[1])), smoothed[2],
            {"step": [steps[i] for i in kept], "run": run}
            | {name: [None if np.isnan(v) else float(f"{v:.6g}") for v in column] for name, column in points.items()},
        )  # fmt: skip

    first, last, lowest, highest = (metric.format(value) for value in (finite[0], finite[-1], low, high))
    gaps, runs = len(every) - len(finite), len(by_run)
    ends = f"first {first}, last {last}" if runs == 1 else f"{runs} runs"
    reference = None
    if chance is not None:
        y, text = float(y_of(chance)), f"chance {metric.format(chance)}"
        # Below the line, since trained values are above it, unless the x-axis is there.
        reference = (y, y + 11 if y + 14 < HEIGHT - BOTTOM else y - 4, text)
    return Chart(
        metric, x_ticks=[(float(x_of(tick)), f"{tick:.6g}") for tick in _ticks(*x_range, 5)],
        y_ticks=[(float(y_of(tick)), label(tick)) for tick in _ticks(*y_range, 4)],
        lines=[line(run, *series) for run, series in by_run.items()], last=last if runs == 1 else "",
        caption=metric.description + (f"; values that were not finite (gaps): {gaps}" if gaps else ""),
        aria_label=f"{metric.title} over {format_number(x_range[1])} epochs: {ends}, lowest {lowest}, "
        f"highest {highest}" + (f", {reference[2]}" if reference else ""), reference=reference,
    )  # fmt: skip


def _y_range(metric: Metric, low: float, high: float) -> tuple[float, float]:
    """Return the extent of the y-axis: the values with a margin, from 0 for shares, and not below the smallest span."""
    smallest = metric.min_span or 0.1 * max(abs(low), abs(high)) or 1.0
    if low >= 0 and (metric.share or metric.name == "lr"):
        return 0.0, min(max(1.06 * high, smallest), 1.02 if metric.share and high <= 1 else math.inf)
    missing = max(0.06 * (high - low), (smallest - (high - low)) / 2)
    top = high + missing
    if metric.largest is not None and high <= metric.largest < top:
        top = metric.largest + 0.02 * smallest
    return min(low - missing, top - smallest), top


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, at least three.

    >>> _ticks(10.4, 11.9, 4), _ticks(0.0, 6.0, 5)
    ([10.5, 11.0, 11.5], [0.0, 2.0, 4.0, 6.0])
    """
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    return [float(value) for value in locator.tick_values(low, high) if low <= value <= high]


def _path(x: Array, y: Array, *, connect: bool = True) -> str:
    """Return an SVG path that is interrupted at missing values; an isolated point becomes a dot by its round caps."""
    drawn = ~np.isnan(y)
    joined = np.concatenate([[False], drawn])[: len(y)] & connect
    points = zip(x[drawn].tolist(), y[drawn].tolist(), joined[drawn].tolist(), strict=True)
    return "".join(f"{'L' if line else 'M'}{left:.2f} {top:.2f}{'' if line else 'l0 0'}" for left, top, line in points)
