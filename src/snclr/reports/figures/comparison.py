"""Figures of a comparison: accuracy or cost per row and seed, and neighbor purity over training."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snclr.reports.figures.drawing import FAINT, GRID, INK, new_figure, save_png
from snclr.reports.text import COMPARED, STUDY_METRICS

# The colorblind-safe palette of Okabe and Ito without yellow, which is too light on white.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_SERIES_TITLES = {"neighbor_purity": "neighbor purity (%)", "queue_knn": "kNN within the queue (%)"}
_REFERENCE_LINE: Mapping[str, Any] = {"color": FAINT, "linewidth": 0.8, "linestyle": (0, (4, 3)), "zorder": 1}
_CHARACTERS_PER_INCH = 11  # of a title


def draw_comparison(table: Mapping[str, Any], path: Path | str) -> bool:
    """Write the figure of a table (PNG): one panel per accuracy metric, or seconds and memory for costs.

    Rows are sorted by the first panel, best first; the first row of the table is the reference line. Return False
    without a file if no run is finished.
    """
    if table["kind"] == "cost":
        panels = [("seconds_per_step", "seconds per step", 1.0), ("peak_mb", "peak MB", 1.0)]
    else:
        panels = [(metric, f"{STUDY_METRICS[metric]} (%)", 100.0) for metric in table["metrics"] if metric in COMPARED]
    rows = [row for row in table["rows"] if any(name in row for name, _, _ in panels)]
    if not rows:
        return False
    first, sign = panels[0][0], 1.0 if table["kind"] == "cost" else -1.0
    rows.sort(key=lambda row: sign * row[first]["mean"] if first in row else math.inf)
    figure, axes = _panels(len(panels), height=1.55 + 0.42 * len(rows))
    for number, (axis, (name, title, scale)) in enumerate(zip(axes, panels, strict=True)):
        _draw_reference(axis, table["rows"][0], name, scale)
        _draw_seeds(axis, rows, name, scale)
        axis.set_xlabel(title, color=INK)
        axis.set_yticks(range(len(rows)), [row["label"] for row in rows] if number == 0 else [""] * len(rows))
        axis.set_ylim(len(rows) - 0.4, -0.6)
    _finish(figure, axes[0], table["title"], path)
    return True


def draw_neighbor_purity(
    study: Mapping[str, Any], records: Sequence[Mapping[int, dict[str, Any]]], path: Path | str
) -> bool:
    """Write neighbor purity over training (PNG); return False without a file if no run has labels.

    `records` has the records of each row by seed. The band is ± one standard deviation over seeds, the dashed line the
    chance level.
    """
    import numpy as np

    figure, axes = _panels(2, height=3.3, grid="both")
    for axis, (name, title) in zip(axes, _SERIES_TITLES.items(), strict=True):
        for number, (row, by_seed) in enumerate(zip(study["rows"], records, strict=True)):
            curves = [curve for record in by_seed.values() if len((curve := _curve(record, name))[0]) > 1]
            if not curves:
                continue
            epochs = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), 100)
            values = 100 * np.stack([np.interp(epochs, *curve) for curve in curves])
            mean = values.mean(0)
            color, dashes = _COLORS[number % len(_COLORS)], _DASHES[number // len(_COLORS) % len(_DASHES)]
            axis.plot(epochs, mean, dashes, color=color, linewidth=1.6, label=row["label"])
            if len(values) > 1:
                sd = values.std(0, ddof=1)
                axis.fill_between(epochs, mean - sd, mean + sd, color=color, alpha=0.15, linewidth=0)
        axis.set_xlabel("epoch", color=INK)
        axis.set_ylabel(title, color=INK)
        axis.set_ylim(bottom=0)
        if axis.lines and (chance := study.get("chance", {}).get(name)) is not None:
            axis.axhline(100 * chance, **_REFERENCE_LINE)
            axis.set_ylim(top=max(axis.get_ylim()[1], 110 * chance))  # lines of this kind do not extend the axis
            axis.text(
                1, 98 * chance, f"chance {chance:.1%}", transform=axis.get_yaxis_transform(), ha="right", va="top",
                fontsize=8, color=FAINT, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )  # fmt: skip
    if not any(axis.lines for axis in axes):
        return False
    shown = "" if len(study["seeds"]) == 1 else ", mean ± standard deviation over seeds"
    _finish(figure, axes[0], f"{study['title']}: neighbors during training{shown}", path)
    return True


def _draw_reference(axis: Any, row: Mapping[str, Any], name: str, scale: float) -> None:
    """Draw a labeled dashed line at the mean of a row."""
    if name not in row:
        return
    x = scale * row[name]["mean"]
    axis.axvline(x, **_REFERENCE_LINE)
    axis.text(
        x, 1.01, f"reference: {row['label']}", transform=axis.get_xaxis_transform(), ha="center", va="bottom",
        fontsize=8, color=FAINT, parse_math=False,
    )  # fmt: skip


def _draw_seeds(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> None:
    """Draw one line of points per row, with mean and standard deviation if a row has several seeds."""
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    for number, seed in enumerate(seeds):
        x = [scale * row.get(name, {}).get("by_seed", {}).get(seed, math.nan) for row in rows]
        y = [y + 0.16 for y in range(len(rows))]
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        axis.scatter(x, y, s=20, marker=marker, color=color, zorder=3, label=f"seed {seed}")
    summaries = [(y, row[name]) for y, row in enumerate(rows) if row.get(name, {}).get("sd") is not None]
    if summaries:
        axis.errorbar(
            [scale * summary["mean"] for _, summary in summaries], [y - 0.12 for y, _ in summaries],
            xerr=[scale * summary["sd"] for _, summary in summaries], fmt="|", color=INK, markersize=11,
            capsize=3, linewidth=1.4, zorder=4, label="mean ± standard deviation",
        )  # fmt: skip


def _curve(record: Mapping[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Return epochs and values of a recorded series without its gaps."""
    series = record.get("series", {})
    pairs = [(e, v) for e, v in zip(series.get("epoch", []), series.get(name, []), strict=False) if v is not None]
    return [e for e, _ in pairs], [v for _, v in pairs]


def _panels(count: int, *, height: float, grid: str = "x") -> tuple[Any, Any]:
    figure = new_figure(8.6, height, dpi=130, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(axis=grid, color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=INK, labelsize=9, length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(grid == "both" and side == "left")
        axis.spines["bottom"].set_color(FAINT)
    return figure, axes


def _finish(figure: Any, axis: Any, title: str, path: Path | str) -> None:
    """Add the title and the legend of `axis`, and write the figure."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=8.5)
    title = textwrap.fill(title, int(_CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, color=INK)
    save_png(figure, path)
