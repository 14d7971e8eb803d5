"""Figures of a comparison: accuracy or cost per row and seed, and neighbor purity over training."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snclr.reports.figures.drawing import FAINT, GRID, INK, new_figure, save_png

# The colorblind-safe palette of Okabe and Ito without yellow, which is too light on white.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_TITLES = {
    "knn": "kNN top-1 (%)", "linear": "linear top-1 (%)", "finetune1": "1 % labels top-1 (%)",
    "finetune10": "10 % labels top-1 (%)", "AP_bb": "box AP (%)", "AP_mk": "mask AP (%)",
}  # fmt: skip
_SERIES_TITLES = {"neighbor_purity": "neighbor purity (%)", "queue_knn": "kNN within the queue (%)"}
_CHARACTERS_PER_INCH = 11  # of a title


def draw_comparison(table: Mapping[str, Any], path: Path | str) -> bool:
    """Write the figure of a table (PNG): one panel per accuracy metric, or seconds and memory for costs.

    Rows are sorted by the first panel, best first; the first row of the table is the reference line. Return False
    without a file if no run is finished.
    """
    if table["kind"] == "cost":
        panels = [("seconds_per_step", "seconds per step", 1.0), ("peak_mb", "peak MB", 1.0)]
    else:
        panels = [(metric, _TITLES[metric], 100.0) for metric in table["metrics"] if metric in _TITLES]
    rows = [row for row in table["rows"] if any(name in row for name, _, _ in panels)]
    if not rows:
        return False
    reference, rows = table["rows"][0], _best_first(rows, panels[0][0], lowest=table["kind"] == "cost")
    figure, axes = _panels(len(panels), height=1.55 + 0.42 * len(rows))
    for number, (axis, (name, title, scale)) in enumerate(zip(axes, panels, strict=True)):
        _draw_reference(axis, reference, name, scale)
        _draw_seeds(axis, rows, name, scale)
        axis.set_xlabel(title, color=INK)
        axis.set_yticks(range(len(rows)), [row["label"] for row in rows] if number == 0 else [""] * len(rows))
        axis.set_ylim(len(rows) - 0.4, -0.6)
    _finish(figure, axes[0], _heading(table), path)
    return True


def draw_neighbor_purity(
    study: Mapping[str, Any], records: Sequence[Mapping[int, dict[str, Any]]], path: Path | str
) -> bool:
    """Write neighbor purity over training (PNG); return False without a file if no run has labels.

    `records` has the records of each row by seed. The band is ± one standard deviation over seeds.
    """
    import numpy as np

    figure, axes = _panels(2, height=3.3, grid="both")
    drawn = False
    for axis, (name, title) in zip(axes, _SERIES_TITLES.items(), strict=True):
        for number, (row, by_seed) in enumerate(zip(study["rows"], records, strict=True)):
            curves = [curve for record in by_seed.values() if len((curve := _curve(record, name))[0]) > 1]
            if not curves:
                continue
            drawn = True
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
    if drawn:
        data = study["title"].partition(": ")[0]
        seeds = "1 seed" if len(study["seeds"]) == 1 else f"mean ± standard deviation of {len(study['seeds'])} seeds"
        _finish(figure, axes[0], f"Neighbors during training on {data}, {seeds}", path)
    return drawn


def _best_first(rows: Sequence[Mapping[str, Any]], name: str, *, lowest: bool) -> list[Mapping[str, Any]]:
    """Sort rows by their mean, highest first or lowest first; rows without a value come last."""
    sign = 1.0 if lowest else -1.0
    return sorted(rows, key=lambda row: sign * row[name]["mean"] if name in row else float("inf"))


def _heading(table: Mapping[str, Any]) -> str:
    """Return the title: what was measured, on which data, what the rows are, and the number of seeds."""
    data, _, topic = table["title"].partition(": ")
    topic = re.sub(r"(, )?\d+ rows?, \d+ seeds?$", "", topic) or "comparison of methods"
    if table["kind"] == "cost":
        return f"Cost on {data}: {topic}"
    if not set(table["metrics"]) <= {"knn", "linear"}:
        return table["title"]
    what = " and ".join("kNN" if metric == "knn" else metric for metric in table["metrics"])
    seeds = len(table["seeds"])
    return f"{what} accuracy on {data}: {topic}, {seeds} seed{'s' * (seeds > 1)}"


def _draw_reference(axis: Any, row: Mapping[str, Any], name: str, scale: float) -> None:
    """Draw a labeled dashed line at the mean of a row."""
    if name not in row:
        return
    x = scale * row[name]["mean"]
    axis.axvline(x, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axis.text(
        x, 1.01, f"reference: {row['label']}", transform=axis.get_xaxis_transform(), ha="center", va="bottom",
        fontsize=8, color=FAINT, parse_math=False,
    )  # fmt: skip


def _draw_seeds(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> None:
    """Draw one line of points per row, with mean and standard deviation if a row has several seeds."""
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    for number, seed in enumerate(seeds):
        drawn = [
            (y, row[name]["by_seed"]) for y, row in enumerate(rows) if seed in row.get(name, {}).get("by_seed", {})
        ]
        x, y = [scale * by_seed[seed] for _, by_seed in drawn], [y + 0.16 for y, _ in drawn]
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        axis.scatter(x, y, s=20, marker=marker, color=color, zorder=3, label=f"seed {seed}")
    summaries = [(y, row[name]) for y, row in enumerate(rows) if row.get(name, {}).get("sd") is not None]
    if not summaries:
        return
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
