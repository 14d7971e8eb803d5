"""Training curves: the metrics of metrics.jsonl as charts, ready for the SVG template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.io.jsonl import is_finite_number
from snclr.reports.text import format_number

Array = npt.NDArray[np.float64]

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
"""Margins around the plot area, in units of the viewBox."""
MAX_POINTS = 400
"""Points per curve; more than there are pixels."""
SMOOTHED_POINTS = 60
"""Points of the smoothed line. It is drawn if at least twice as many values were logged."""


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

    def format(self, value: float) -> str:
        """Format a value: shares as percent."""
        return f"{value:.1%}" if self.share else format_number(value)


METRICS = (
    Metric("loss", "Loss", "sum over both directions"),
    Metric("lr", "Learning rate", "of the logged step", noisy=False),
    Metric("spread", "Spread", "1: features spread out; 0: collapsed"),
    Metric("effective_rank", "Effective rank", "of the features of a batch"),
    Metric("same_class", "Neighbor purity", "neighbors with the image's class (labels are not used in training)", True),
    Metric("queue_knn", "Queue kNN", "kNN accuracy within the queue", True),
    Metric("positiveness_entropy", "Positiveness entropy", "1: equal weights; 0: one neighbor has all the weight"),
    Metric("neighbor_age", "Neighbor age", "steps since a neighbor entered the queue"),
    Metric("neighbor_cosine", "Neighbor cosine", "mean cosine similarity of an image and its neighbors"),
    Metric("neighbor_agreement", "Neighbor agreement", "neighbors of one view that the other view also finds", True),
    Metric("queue_agreement", "Queue agreement", "neighbors that two similar images have in common", True),
    Metric("pulled_share", "Pulled share", "neighbors that the loss pulls an image toward", True),
    Metric("gradient_norm", "Gradient norm", "before clipping"),
    Metric("queue_fill", "Queue fill", "filled share of the queue", True, noisy=False),
    Metric("images_per_second", "Images per second", "over the last minute"),
)


@dataclass(frozen=True)
class Chart:
    """One chart: SVG paths in viewBox units, ticks (position, label), and the points for the script."""

    metric: Metric
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    path: str
    smoothed_path: str
    window: int
    """Values per point of the smoothed line."""
    last: str
    caption: str
    aria_label: str
    points: dict[str, Any] = field(repr=False)


def build_charts(records: Sequence[dict[str, Any]]) -> list[Chart]:
    """Build a chart for every metric with finite values; all charts share the epoch axis."""
    logged = {metric: series for metric in METRICS if (series := read_series(records, metric)) is not None}
    last_epoch = max((float(epochs[-1]) for _, epochs, _ in logged.values()), default=0.0)
    x_range = (0.0, last_epoch) if last_epoch > 0 else (-0.5, 0.5)
    return [_chart(metric, *series, x_range) for metric, series in logged.items()]


def read_series(records: Sequence[dict[str, Any]], metric: Metric) -> tuple[list[int], Array, Array] | None:
    """Return steps, epochs and values of a metric, NaN where a value is not finite; None if no value is finite."""
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
    if sizes := sorted({chart.window for chart in charts if chart.smoothed_path}):
        window = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"Thin: logged steps. Bold: mean over {window} logged steps. The number is the last logged value."
    return "Every logged step, over epochs."


def _chart(metric: Metric, steps: list[int], epochs: Array, values: Array, x_range: tuple[float, float]) -> Chart:
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    from_zero = low >= 0 and (metric.share or metric.name == "lr")
    padding = 0.06 * (high - (0.0 if from_zero else low)) or 0.1 * abs(low) or 1.0
    y_range = (0.0 if from_zero else low - padding, high + padding)
    kept = downsample(values)
    smoothed = smooth(epochs, values) if metric.noisy else (np.empty(0), np.empty(0), 1)
    first, last, lowest, highest = (metric.format(value) for value in (finite[0], finite[-1], low, high))
    gaps = len(values) - len(finite)

    def x_of(epochs: Any) -> Any:
        return np.interp(epochs, x_range, (LEFT, WIDTH - RIGHT))

    def y_of(values: Any) -> Any:
        return np.interp(values, y_range, (HEIGHT - BOTTOM, TOP))

    def label(value: float) -> str:
        return f"{value * 100:.4g} %" if metric.share else f"{value:.6g}"

    points = {"epoch": epochs[kept], "value": values[kept], "x": x_of(epochs[kept]), "y": y_of(values[kept])}
    return Chart(
        metric, x_ticks=[(float(x_of(tick)), f"{tick:.6g}") for tick in _ticks(*x_range, 5)],
        y_ticks=[(float(y_of(tick)), label(tick)) for tick in _ticks(*y_range, 4)],
        path=_path(points["x"], points["y"]), smoothed_path=_path(x_of(smoothed[0]), y_of(smoothed[1])),
        window=smoothed[2], last=last,
        caption=metric.description + (f"; values that were not finite (gaps): {gaps}" if gaps else ""),
        aria_label=f"{metric.title} over {format_number(x_range[1])} epochs: first {first}, last {last}, "
        f"lowest {lowest}, highest {highest}",
        points={"step": [steps[i] for i in kept], "share": metric.share}
        | {name: [None if np.isnan(v) else float(f"{v:.6g}") for v in column] for name, column in points.items()},
    )  # fmt: skip


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`."""
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(value) for value in values if low <= value <= high]


def _path(x: Array, y: Array) -> str:
    """Return an SVG path that is interrupted at missing values; an isolated point becomes a dot by its round caps."""
    parts, connected = [], False
    for left, top in zip(x.tolist(), y.tolist(), strict=True):
        if not np.isnan(top):
            parts.append(f"L{left:.2f} {top:.2f}" if connected else f"M{left:.2f} {top:.2f}l0 0")
        connected = not np.isnan(top)
    return "".join(parts)
