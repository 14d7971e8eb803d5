"""Figures of a comparison: every seed as a point with mean and deviation, purity over training, cost against queue."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snclr.durable import write_atomic

_INK, _FAINT, _GRID, _PAPER = "#1d232b", "#6b7480", "#e7eaee", "#ffffff"
# Told apart with colour blindness too (Okabe and Ito), light yellow left out: it is lost on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_TITLES = {"knn": "kNN top-1 (%)", "linear": "linear top-1 (%)"}
_DPI = 130


def draw_comparison(table: Mapping[str, Any], path: Path | str) -> None:
    """Write the table's figure (PNG): accuracy a panel a metric, or, for costs, seconds and memory."""
    metrics = table["metrics"]
    if table["kind"] == "cost":
        panels = [("seconds_per_step", "seconds a step", 1.0), ("peak_mb", "peak MB", 1.0)]
    else:
        panels = [(metric, _TITLES[metric], 100.0) for metric in metrics]
    rows = [row for row in table["rows"] if any(name in row for name, _, _ in panels)]
    if not rows:
        return
    figure, axes = _blank(len(panels), height=1.35 + 0.42 * len(rows))
    for number, (axis, (name, title, scale)) in enumerate(zip(axes, panels, strict=True)):
        _dots(axis, rows, name, scale)
        axis.set_xlabel(title, color=_INK)
        axis.set_yticks(range(len(rows)), [row["label"] for row in rows] if number == 0 else [""] * len(rows))
        axis.set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(table["title"], x=0.01, ha="left", fontsize=10.5, color=_INK)
    _legend(figure, table["seeds"])
    write_atomic(path, _png(figure))


def _dots(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> None:
    """A point for each seed and the mean with its deviation, a row each; a faint line at the first row's mean."""
    if name in rows[0]:
        axis.axvline(scale * rows[0][name]["mean"], color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    for place, row in enumerate(rows):
        found = row.get(name)
        if found is None:
            continue
        for seed, value in found["by_seed"].items():
            style = _seed_style(seeds.index(int(seed)))
            axis.plot(scale * value, place + 0.16, markersize=4.5, alpha=0.85, zorder=3, **style)
        sd = scale * found["sd"] if found["sd"] is not None else 0.0
        axis.errorbar(
            scale * found["mean"], place - 0.12, xerr=sd, fmt="|", color=_INK, markersize=11, capsize=3, linewidth=1.4,
            zorder=4,
        )  # fmt: skip


def draw_purity(study: Mapping[str, Any], records: Sequence[Mapping[int, dict[str, Any]]], path: Path | str) -> bool:
    """Write how pure the neighbours are as training goes on (PNG); False, and no file, where no run has labels.

    `records` are for each row its records by seed. The band is ± one standard deviation over seeds.
    """
    import numpy as np

    names = (("same_class", "neighbours of the right class (%)"), ("queue_knn", "class by the neighbours' vote (%)"))
    figure, axes = _blank(2, height=3.3, grid="both")
    drawn = False
    for axis, (name, title) in zip(axes, names, strict=True):
        for number, (row, own) in enumerate(zip(study["rows"], records, strict=True)):
            curves = [_curve(record, name) for record in own.values()]
            curves = [(epochs, values) for epochs, values in curves if len(epochs) > 1]
            if not curves:
                continue
            drawn = True
            epochs = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), 100)
            values = 100 * np.stack([np.interp(epochs, *curve) for curve in curves])
            colour, dashes = _COLOURS[number % len(_COLOURS)], ["-", "--", ":", "-."][number // len(_COLOURS) % 4]
            axis.plot(epochs, values.mean(0), dashes, color=colour, linewidth=1.6, label=row["label"])
            if len(values) > 1:
                mean, sd = values.mean(0), values.std(0, ddof=1)
                axis.fill_between(epochs, mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)
        axis.set_xlabel("epoch", color=_INK)
        axis.set_ylabel(title, color=_INK)
    if drawn:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=8.5
        )
        figure.suptitle(study["title"], x=0.01, ha="left", fontsize=10.5, color=_INK)
        write_atomic(path, _png(figure))
    return drawn


def _curve(record: Mapping[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Epochs and values of one run's series, where it has values."""
    series = record.get("series", {})
    pairs = [(e, v) for e, v in zip(series.get("epoch", []), series.get(name, []), strict=False) if v is not None]
    return [e for e, _ in pairs], [v for _, v in pairs]


def _blank(panels: int, *, height: float, grid: str = "x") -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), dpi=_DPI, facecolor=_PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(axis=grid, color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=_INK, labelsize=9, length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(grid == "both" and side == "left")
        axis.spines["bottom"].set_color(_FAINT)
    return figure, axes


def _seed_style(number: int) -> dict[str, Any]:
    return {"marker": _MARKERS[number % 7], "color": _COLOURS[number % 7], "linestyle": ""}


def _legend(figure: Any, seeds: Sequence[int]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], markersize=5, **_seed_style(i)) for i in range(len(seeds))]
    labels = [f"seed {seed}" for seed in seeds]
    mean = Line2D([], [], marker="|", color=_INK, markersize=10, linewidth=1.4)
    figure.legend(
        [*handles[:7], mean], [*labels[:7], "mean ± standard deviation"], loc="outside lower center",
        ncols=min(8, len(labels[:7]) + 1), frameon=False, fontsize=8.5,
    )  # fmt: skip


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script the font lacks
        figure.savefig(buffer, format="png", dpi=_DPI, facecolor=_PAPER, metadata={"Software": None})
    return buffer.getvalue()
