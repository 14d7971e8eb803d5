"""A run's training curves as SVG, drawn from metrics.jsonl; every drawn number is a logged one or a stated mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from snclr.json_values import is_number
from snclr.report.markup import escape, figure

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24  # around the plot
MOST_POINTS = 400
"""Of one curve: more than there are pixels."""
MEANS = 60
"""Points of the bold line, which is drawn where there are at least twice as many logged ones."""

Scale = Literal["share", "fit"]


@dataclass(frozen=True)
class Metric:
    """A name in metrics.jsonl and what people are told of it."""

    name: str
    title: str
    words: str
    scale: Scale = "fit"
    """share: per cent, from 0; fit: from the smallest to the largest value."""
    noisy: bool = True
    """Whether a mean over many steps says more than one step."""


METRICS = (
    Metric("loss", "Loss", "both directions together"),
    Metric("lr", "Learning rate", "of the step", noisy=False),
    Metric("spread", "Spread", "near 1 spread out, 0 collapsed"),
    Metric("effective_rank", "Effective rank", "directions the features of a batch use"),
    Metric("same_class", "Neighbour purity", "neighbours with the image's class; labels only watch", "share"),
    Metric("queue_knn", "Queue kNN", "images whose class their neighbours vote for", "share"),
    Metric("positiveness_entropy", "Positiveness entropy", "1: all neighbours count alike; 0: only one does"),
    Metric("neighbor_age", "Neighbour age", "steps since a neighbour entered the queue"),
    Metric("neighbor_cosine", "Neighbour cosine", "mean likeness of an image and its neighbours"),
)
MORE_METRICS = (
    Metric("gradient_norm", "Gradient norm", "before clipping"),
    Metric("queue_fill", "Queue fill", "share of the queue that holds features", "share", noisy=False),
    Metric("images_per_second", "Images a second", "over the last minute or so"),
)


@dataclass(frozen=True)
class Series:
    """The logged values of one metric: None where one was not finite. All lists are of one length."""

    metric: Metric
    steps: list[int]
    epochs: list[float]
    values: list[float | None]

    @property
    def known(self) -> list[float]:
        """The values that are numbers."""
        return [value for value in self.values if value is not None]


def read_series(records: Sequence[dict[str, Any]], metric: Metric) -> Series | None:
    """One metric of all records that have it, in order; None where no record has a number."""
    steps, epochs, values = [], [], []
    for record in records:
        timing = record.get("timing")
        place = timing if isinstance(timing, dict) and metric.name in timing else record
        step, epoch = record.get("step"), record.get("epoch")
        if metric.name in place and is_number(step) and is_number(epoch):
            value = place[metric.name]
            steps.append(int(step))  # type: ignore[arg-type]
            epochs.append(float(epoch))  # type: ignore[arg-type]
            values.append(float(value) if is_number(value) else None)
    series = Series(metric, steps, epochs, values)
    return series if series.known else None


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Places of at most about `most` values to draw: of each bucket the smallest, the largest and any gap.

    >>> thin([5.0, 1.0, 9.0, 3.0, 4.0, 2.0], most=4)
    [0, 1, 2, 4, 5]
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    size = -(-count // max(1, most // 2))
    kept = {0, count - 1}
    for start in range(0, count, size):
        bucket = range(start, min(start + size, count))
        known = [(value, place) for place in bucket if (value := values[place]) is not None]
        gap = next((place for place in bucket if values[place] is None), None)
        kept.update([min(known)[1], max(known)[1]] if known else [])
        kept.update([] if gap is None else [gap])
    return sorted(kept)


def means(series: Series) -> tuple[list[float], list[float], int]:
    """Epochs and values of the bold line: means of `size` logged values in a row; empty where there are too few."""
    pairs = [(epoch, value) for epoch, value in zip(series.epochs, series.values, strict=True) if value is not None]
    size = len(pairs) // MEANS
    if not series.metric.noisy or size < 2:
        return [], [], 1
    groups = [pairs[start : start + size] for start in range(0, len(pairs) - size + 1, size)]
    xs = [sum(epoch for epoch, _ in group) / size for group in groups]
    return xs, [sum(value for _, value in group) / size for group in groups], size


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, in steps of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0, 16), ticks(0.71, 0.93)
    ([0.0, 5.0, 10.0, 15.0], [0.75, 0.8, 0.85, 0.9])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 2.5, 5) if power * factor >= rough * (1 - 1e-9)), power * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Where values lie on the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, epoch: float) -> float:
        """Return the x of an epoch."""
        return LEFT + (epoch - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        """Return the y of a value."""
        return HEIGHT - BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)

    def path(self, xs: Sequence[float], ys: Sequence[float | None]) -> str:
        """A line through the points, broken where a value is missing; a lone point is a dot by its round ends."""
        parts, begun = [], False
        for x, y in zip(xs, ys, strict=True):
            if y is not None:
                point = f"{self.across(x):.2f} {self.up(y):.2f}"
                parts.append(f"L{point}" if begun else f"M{point}l0 0")
            begun = y is not None
        return "".join(parts)


def frame_of(series: Series, epochs: tuple[float, float]) -> Frame:
    """Axes that hold all values of a series; `epochs` are the ends of the x axis, one for all charts."""
    low, high = min(series.known), max(series.known)
    if series.metric.scale == "share" and low >= 0:
        low, high = 0.0, min(1.0, high * 1.08) if high <= 1 else high * 1.08
    elif series.metric.name == "lr" and low >= 0:
        low, high = 0.0, high * 1.05
    else:
        edge = 0.06 * (high - low)
        low, high = low - edge, high + edge
    if not high > low:  # one value all along
        edge = abs(low) * 0.1 or 1.0
        low, high = low - edge, high + edge
    return Frame(epochs if epochs[1] > epochs[0] else (epochs[0] - 0.5, epochs[1] + 0.5), (low, high))


def draw(series: Series, epochs: tuple[float, float]) -> str:
    """One chart as a figure element; the exact axes are in data attributes, for the script and for tests."""
    frame, metric = frame_of(series, epochs), series.metric
    places = thin(series.values)
    raw = frame.path([series.epochs[place] for place in places], [series.values[place] for place in places])
    xs, ys, _ = means(series)
    bold = f'<path class="mean" d="{frame.path(xs, ys)}"/>' if xs else ""
    last = series.known[-1]
    gaps = len(series.values) - len(series.known)
    notes = [metric.words] + ([f"{gaps} values were not finite and are gaps"] if gaps else [])
    told = value_words(last, metric)
    words = (
        f"{metric.title} over {figure(epochs[1])} epochs: first {value_words(series.known[0], metric)}, last {told}, "
        f"lowest {value_words(min(series.known), metric)}, highest {value_words(max(series.known), metric)}"
    )
    return (
        f'<figure class="chart" data-metric="{escape(metric.name)}">'
        f"<figcaption><b>{escape(metric.title)}</b><output>{escape(told)}</output>"
        f"<small>{escape('; '.join(notes))}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words, 400)}" '
        f'data-x0="{frame.x[0]!r}" data-x1="{frame.x[1]!r}" data-y0="{frame.y[0]!r}" data-y1="{frame.y[1]!r}">'
        f"{_axes(frame, metric)}"
        f'<path class="{"raw faint" if xs else "raw"}" d="{raw}"/>{bold}<g class="cursor" visibility="hidden">'
        f'<line y1="{TOP}" y2="{HEIGHT - BOTTOM}"/><circle r="3.5"/></g></svg></figure>'
    )


def draw_all(records: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> tuple[str, dict[str, Any]]:
    """The charts of all metrics that were logged, and their drawn points for the script."""
    found = [series for metric in metrics if (series := read_series(records, metric)) is not None]
    if not found:
        return "", {}
    last = max(series.epochs[-1] for series in found)
    data = {}
    for series in found:
        places = thin(series.values)
        data[series.metric.name] = {
            "step": [series.steps[place] for place in places],
            "epoch": [_short(series.epochs[place]) for place in places],
            "value": [_short(series.values[place]) for place in places],
            "share": series.metric.scale == "share",
        }
    charts = "".join(draw(series, (0.0, last)) for series in found)
    return f'<div class="charts">{charts}</div>', data


def line_words(records: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> str:
    """What the lines of the charts are, in a sentence or two."""
    drawn = [means(series) for metric in metrics if (series := read_series(records, metric)) is not None]
    sizes = sorted({size for xs, _, size in drawn if xs})
    if not sizes:
        return "Every logged step, over epochs."
    counts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"Over epochs. Thin: logged steps. Bold: means of {counts} logged steps in a row. Numbers are of the last step."
    )


def value_words(value: float, metric: Metric) -> str:
    """A value as it is printed: a share in per cent."""
    return f"{value:.1%}" if metric.scale == "share" else figure(value)


def _axes(frame: Frame, metric: Metric) -> str:
    parts = []
    for value in ticks(*frame.y, most=4):
        y = f"{frame.up(value):.2f}"
        label = f"{value:.6g}" if metric.scale != "share" else f"{value * 100:.4g} %"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y}" dy=".35em">{escape(label)}</text>')
    for epoch in ticks(*frame.x, most=5):
        x = f"{frame.across(epoch):.2f}"
        parts.append(f'<text class="x" x="{x}" y="{HEIGHT - 8}">{escape(f"{epoch:.6g}")}</text>')
    return "".join(parts)


def _short(value: float | None) -> float | None:
    """Enough digits to read, few enough for a small page."""
    return None if value is None else float(f"{value:.6g}")
