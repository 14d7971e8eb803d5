"""Rebuild the tables and figures of the neighbor study in docs/results from results/neighbor-study.jsonl.

    python scripts/neighbor_tables.py            # part of `make results`
    python scripts/neighbor_tables.py --check    # changes nothing; exit code 1 if a page is out of date

The content between `<!-- NAME -->` and `<!-- end -->` is replaced; NAME is a function of `SECTIONS`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neighbor_study import (
    DATA,
    RECORDS,
    ROOT,
    ROWS,
    SHARED_ROWS,
    UNTRAINED,
    UNTUNED,
    all_runs,
    chosen_settings,
    read_records,
    tuning_runs,
)
from snclr.studies.tables import paired, summarize

RESULTS = ROOT / "docs" / "results"
PAGES = (RESULTS / "neighbor-study.md", RESULTS / "neighbor-study-runs.md")
FIGURES = RESULTS / "figures"
METRICS = {"one_label": "one label", "four_labels": "four labels", "knn": "kNN", "linear": "linear"}
COLORS = {"soft-max": "#2f6fb3", "hard": "#c8553d", "coil100": "#2f6fb3", "omniglot": "#c8553d", "cifar5": "#3f8f5f",
          "cifar10": "#7d5fb2", "digits": "#b58a1d", "mnist": "#5a5a5a", "fashion": "#c06fa8"}  # fmt: skip
MARKERS = {"coil100": "o", "digits": "v", "omniglot": "s", "cifar5": "^", "cifar10": "D", "mnist": "P", "fashion": "X"}
STEPS = {"momentum": "no EMA", "predictor_layers": "no predictor", "negatives": "negatives of both views"}
"""Settings of the ladder, in words."""
LADDER_METRICS = {"coil100": ("one_label", "four_labels"), "cifar5": ("knn", "linear")}

MAIN = {
    "digits": ("test4", "tuned", "soft-max"), "coil100": ("test", "tuned", "soft-max"),
    "fashion": ("gate", "untuned", "soft-max"), "mnist": ("gate", "untuned", "soft-max"),
    "cifar5": ("test", "tuned", "soft-max"), "omniglot": ("test", "tuned", "soft-max"),
    "cifar10": ("test", "untuned", "soft"),
}  # fmt: skip
"""Stage of each dataset in the main table, whether its settings are tuned, and its row of soft neighbors."""

STAGES = {
    "tune": "round 1, trials", "test": "round 1, tests (`cifar10`: untuned)", "tune2": "round 2, trials",
    "test2": "round 2, tests", "tune3": "round 3, trials", "test3": "round 3, tests", "tune4": "round 4, trials",
    "test4": "round 4, tests", "cpu": "equal CPU seconds", "cpu4": "equal CPU seconds, round 4",
    "sector": "held-out poses", "ablate": "ablations", "sweep": "sweep", "agreeing": "agreeing neighbors",
    "gate": "gate", "search": "other searches", "ladder": "ladder", "weights": "from ImageNet weights",
    "tune5": "from ImageNet weights, trials", "test5": "from ImageNet weights, tuned",
}  # fmt: skip
"""Stages in the order of the protocol, in words."""

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    a = parser.parse_args(argv)
    records = list(read_records(RECORDS).values())
    old = {page: page.read_text(encoding="utf-8") for page in PAGES}
    new = {page: _rebuilt(text, records) for page, text in old.items()}
    if a.check:
        stale = [str(page) for page in PAGES if new[page] != old[page]]
        print(f"out of date: {', '.join(stale)}; run make results" if stale else "up to date")
        return int(bool(stale))
    for page, text in new.items():
        page.write_text(text, encoding="utf-8")
    FIGURES.mkdir(parents=True, exist_ok=True)
    draw_gain(records, FIGURES / "neighbor-gain.png")
    draw_estimate(records, FIGURES / "neighbor-estimate.png")
    print(f"{', '.join(page.name for page in PAGES)}: rebuilt from {len(records)} runs")
    return 0


def _rebuilt(text: str, records: list[Record]) -> str:
    """Return a page with the content of each section written anew."""
    return re.sub(
        r"(<!-- ([\w-]+) -->\n)(.*?)(<!-- end -->)",
        lambda m: f"{m[1]}\n{SECTIONS[m[2]](records).strip()}\n\n{m[4]}", text, flags=re.DOTALL,
    )  # fmt: skip


# Tables.


def main_table(records: list[Record]) -> str:
    """Return purity, accuracy without neighbors and the gains of soft, hard and SimCLR over it, for each dataset."""
    lines = [
        "| data | settings | seeds | purity | metric | none | soft − none | hard − none | SimCLR − none |",
        "|---|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for data, (stage, tuned, soft) in MAIN.items():
        runs = [r for r in records if r["stage"] == stage and r["data"] == data]
        if stage == "gate":  # without the gate and other views
            runs = [r for r in runs if not {"views", "min_agreement"} & set(r["settings"])]
        rows = {row: {r["seed"]: r for r in runs if r["row"] == row} for row in ("none", soft, "hard", "simclr")}
        if not rows["none"]:
            continue
        metrics = [name for name in METRICS if name in next(iter(rows["none"].values()))]
        for metric in metrics:
            base = {seed: r[metric] for seed, r in rows["none"].items()}
            others = (paired({s: r[metric] for s, r in rows[row].items()}, base) for row in list(rows)[1:])
            words = f"{tuned}, γ = {'max' if soft == 'soft-max' else 1}"
            cells = [data, words, str(len(base)), _percent(rows[soft], "neighbor_purity")]
            cells = cells if metric == metrics[0] else [""] * 4
            cells += [METRICS[metric], _mean_sd(list(base.values())), *map(_difference, others)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def coverage_table(records: list[Record]) -> str:
    """Return how many of the stated runs of each stage and dataset are recorded."""
    by_key = {r["key"]: r for r in records}
    stated: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in all_runs(by_key):
        stated[run.stage, run.data].add(run.key)
    lines = ["| stage | recorded of the stated runs |", "|---|---|"]
    for stage, words in STAGES.items():
        parts = [
            f"`{data}` {len(keys & by_key.keys())} of {len(keys)}" for (s, data), keys in stated.items() if s == stage
        ]
        lines.append(f"| {words} | {', '.join(parts)} |")
    return "\n".join(lines)


def accuracy_tables(records: list[Record]) -> str:
    """Return one table per dataset: accuracy, difference to none, purity and CPU seconds of each row."""
    parts = []
    for data in DATA:
        parts += [
            _accuracy_table(f"`{data}`, round {round_ or 1}", rows)
            for round_ in ("", "2", "4")
            if (rows := _rows_of(records, f"test{round_}", data))
        ]
        if shared := _rows_of(records, "test3", data):
            two = {row: runs for row, runs in _rows_of(records, "test2", data).items() if row in ("none", "simclr")}
            parts.append(_accuracy_table(f"`{data}`, round 3", {**shared, **two}, base="none-shared"))
        for round_ in ("", "4"):
            if longer := _rows_of(records, f"cpu{round_}", data):
                tests = _rows_of(records, f"test{round_}", data)
                parts.append(_accuracy_table(f"`{data}`, round {round_ or 1}, equal CPU seconds", {**tests, **longer}))
    if rows := _rows_of(records, "sector", "coil100-sector"):
        parts.append(_accuracy_table("`coil100`, held-out poses", rows))
    return "\n\n".join(parts)


def _rows_of(records: list[Record], stage: str, data: str) -> dict[str, dict[int, Record]]:
    """Return the runs of a stage by row and seed; rows without runs are left out."""
    runs = [r for r in records if r["stage"] == stage and r["data"] == data]
    rows = {row: {r["seed"]: r for r in runs if r["row"] == row} for row in (*ROWS, *SHARED_ROWS)}
    return {row: of_row for row, of_row in rows.items() if of_row}


def ablation_table(records: list[Record]) -> str:
    """Return the difference of each changed setting to the tuned soft row."""
    tests = _rows_of(records, "test", "coil100")
    base = tests.get("soft", {})
    chosen = next(iter(base.values()))["settings"] if base else {}
    groups: dict[str, dict[int, Record]] = defaultdict(dict)
    groups |= {f"row `{row}`": tests[row] for row in ("none", "hard") if row in tests}
    for r in records:
        if r["stage"] == "ablate":
            changed = {name: value for name, value in r["settings"].items() if chosen.get(name) != value}
            groups[", ".join(f"{name} {value}" for name, value in changed.items())][r["seed"]] = r
    lines = ["| change | seeds | one label | − soft | four labels | − soft | purity |", "|---|--:|--:|--:|--:|--:|--:|"]
    for change, runs in (("no change (`soft`)", base), *groups.items()) if base else ():
        cells = [change, str(len(runs))]
        for metric in ("one_label", "four_labels"):
            own, other = ({seed: r[metric] for seed, r in each.items()} for each in (runs, base))
            cells += [_mean_sd(list(own.values())), "" if runs is base else _difference(paired(own, other))]
        lines.append("| " + " | ".join([*cells, _percent(runs, "neighbor_purity")]) + " |")
    return "\n".join(lines)


def search_table(records: list[Record]) -> str:
    """Return the difference of each other search to soft neighbors with the default search, and to none."""
    lines = [
        "| data | search | seeds | metric | accuracy | − default | − none | purity | agreement |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for data in DATA:
        same = [r for r in records if r["data"] == data and r["stage"] in ("sweep", "gate", "search")]
        default = {**UNTUNED, "neighbors": 10}
        none = {r["seed"]: r for r in same if r["row"] == "none" and not {"views", "crop_min"} & r["settings"].keys()}
        base = {r["seed"]: r for r in same if r["row"] == "soft-max" and r["settings"] == default}
        groups: dict[str, dict[int, Record]] = {"default": base} if base else {}
        for r in same:
            if r["stage"] == "search":
                changed = [f"{name} {value}" for name, value in r["settings"].items() if name not in default]
                groups.setdefault(", ".join(changed), {})[r["seed"]] = r
        if not any(r["stage"] == "search" for r in same):
            continue
        for change, runs in groups.items():
            metric = next(name for name in METRICS if name in next(iter(runs.values())))
            own, other, start = ({seed: r[metric] for seed, r in each.items()} for each in (runs, base, none))
            cells = [data, change, str(len(runs)), METRICS[metric], _mean_sd(list(own.values()))]
            cells += ["" if runs is base else _difference(paired(own, other)), _difference(paired(own, start))]
            cells += [_percent(runs, name) for name in ("neighbor_purity", "neighbor_agreement")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def weights_table(records: list[Record]) -> str:
    """Return the accuracy of the weights without training, and of the rows that start from them."""
    rows: dict[tuple[str, str, str], dict[int, Record]] = defaultdict(dict)
    for r in records:
        if r["stage"] in ("weights", "test5"):
            space = "encoder features" if "search_space" in r["settings"] else "projections"
            rows[r["stage"], r["row"], space][r["seed"]] = r
    lines = [
        "| row | learning rate | search in | seeds | kNN | − none | linear | − none | purity | agreement |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    order = [UNTRAINED, *ROWS]
    for (stage, row, space), runs in sorted(
        rows.items(), key=lambda item: (item[0][0] != "weights", order.index(item[0][1]))
    ):
        rates = {r["settings"].get("lr", DATA[r["data"]].settings["lr"]) for r in runs.values()}
        cells = [
            row,
            "–" if row == UNTRAINED else f"{rates.pop():g}",
            space if row in ("soft", "hard") else "–",
            str(len(runs)),
        ]
        base = rows.get((stage, "none", "projections"), {})
        for metric in ("knn", "linear"):
            own, other = ({seed: r[metric] for seed, r in each.items()} for each in (runs, base))
            cells += [_mean_sd(list(own.values())), "" if row == "none" else _difference(paired(own, other))]
        cells += [_percent(runs, name) for name in ("neighbor_purity", "neighbor_agreement")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ladder_table(records: list[Record]) -> str:
    """Return the accuracy of each step from SNCLR without neighbors to SimCLR, and of the last one with neighbors."""
    groups: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for r in records:
        is_start = r["stage"] == "sweep" and r["row"] == "none" and r["settings"] == UNTUNED
        if r["data"] in LADDER_METRICS and (is_start or r["stage"] == "ladder"):
            changes = [STEPS[name] for name in STEPS if name in r["settings"]]
            names = {"none": ["none", *changes], "simclr": ["simclr"], "soft-max": ["soft-max, K = 10", *changes]}
            groups[r["data"], ", ".join(names[r["row"]])][r["seed"]] = r
    lines = ["| data | row | seeds | metric | accuracy | − none |", "|---|---|--:|---|--:|--:|"]
    data_order, row_order = list(LADDER_METRICS), ["none", "simclr", "soft-max"]

    def order(group: tuple[str, str]) -> tuple[int, int, int]:
        return data_order.index(group[0]), row_order.index(group[1].split(",")[0]), len(group[1])

    for data, name in sorted(groups, key=order):
        runs = groups[data, name]
        for metric in LADDER_METRICS[data]:
            own, base = ({s: r[metric] for s, r in each.items()} for each in (runs, groups[data, "none"]))
            difference = "" if name == "none" else _difference(paired(own, base))
            accuracy = _mean_sd(list(own.values()))
            lines.append(f"| {data} | {name} | {len(runs)} | {METRICS[metric]} | {accuracy} | {difference} |")
    return "\n".join(lines)


def _accuracy_table(title: str, rows: dict[str, dict[int, Record]], base: str = "none") -> str:
    metrics = [name for name in METRICS if name in next(iter(next(iter(rows.values())).values()))]
    seeds = sorted({seed for runs in rows.values() for seed in runs})
    header = "| row | seeds | " + " | ".join(f"{METRICS[m]} | − {base}" for m in metrics)
    lines = [
        f"**{title}**, seeds {', '.join(map(str, seeds))}", "",
        f"{header} | purity | agreement | CPU s |", "|---|--:|" + "--:|--:|" * len(metrics) + "--:|--:|--:|",
    ]  # fmt: skip
    for row, runs in rows.items():
        cells = [row, str(len(runs))]
        for metric in metrics:
            own = {seed: record[metric] for seed, record in runs.items()}
            other = {seed: record[metric] for seed, record in rows.get(base, {}).items()}
            cells += [_mean_sd(list(own.values())), "" if row == base else _difference(paired(own, other))]
        cells += [_percent(runs, "neighbor_purity"), _percent(runs, "neighbor_agreement")]
        cells.append(f"{statistics.fmean(r['cpu_seconds'] for r in runs.values()):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean_sd(values: list[float]) -> str:
    summary = summarize(values)
    return f"{summary['mean']:.1f}" + ("" if summary["sd"] is None else f" ± {summary['sd']:.1f}")


def _difference(pair: dict[str, Any] | None) -> str:
    if pair is None:
        return "–"
    if pair["interval"] is None:
        return f"{pair['mean']:+.1f}"
    low, high = pair["interval"]
    bold = "**" if pair["verdict"] in ("higher", "lower") else ""
    return f"{bold}{pair['mean']:+.1f}{bold} ({low:+.1f}, {high:+.1f})"


def _percent(runs: dict[int, Record], name: str) -> str:
    values = [r[name] for r in runs.values() if r.get(name) is not None]
    return f"{100 * statistics.fmean(values):.0f} %" if values else "–"


def tuning_table(records: list[Record]) -> str:
    """Return the chosen trial of each row and dataset."""
    by_key = {r["key"]: r for r in records}
    lines = ["| data | row | round | chosen | validation accuracy of the trials |", "|---|---|--:|---|---|"]
    for data in DATA:
        for row in (*ROWS, *SHARED_ROWS):
            for round_ in ("3",) if row in SHARED_ROWS else ("", "2", "4"):
                if best := chosen_settings(data, row, by_key, round_):
                    chosen = ", ".join(f"{name} {value}" for name, value in sorted(best.items()))
                    trials = tuning_runs(data, row, round_, by_key) or ()
                    scores = ", ".join(f"{by_key[run.key]['validation']:.1f}" for run in trials)
                    lines.append(f"| {data} | {row} | {round_ or 1} | {chosen} | {scores} |")
    return "\n".join(lines)


def sweep_table(records: list[Record]) -> str:
    """Return gains over none and purity of every point of the figure, and the gains of SimCLR and with the gate."""
    lines = [
        "| data | views | K | row | seeds | purity | agreement | used | one label, or kNN | four labels, or linear |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for point in gains(records):
        shares = [_percent(point["runs"], name) for name in ("neighbor_purity", "neighbor_agreement", "neighbors_used")]
        cells = [point["data"], point["views"], str(point["k"] or "–"), point["row"], str(len(point["runs"])), *shares]
        lines.append("| " + " | ".join([*cells, *map(_difference, point["pairs"])]) + " |")
    return "\n".join(lines)


def gate_table(records: list[Record]) -> str:
    """Return the gain over none of ten soft neighbors with and without the gate, in each setting that has both."""
    points = {(p["data"], p["views"], p["row"]): p for p in gains(records) if p["k"] == 10}
    lines = [
        "| data | views | seeds | agreement | epochs with neighbors | soft with the gate − none | soft − none |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (data, views, row), point in points.items():
        if row == "gated soft-max":
            always = points.get((data, views, "soft-max"))
            shares = [_percent(point["runs"], name) for name in ("neighbor_agreement", "neighbors_used")]
            pairs = [_difference(point["pairs"][0]), _difference(always and always["pairs"][0])]
            lines.append("| " + " | ".join([data, views, str(len(point["runs"])), *shares, *pairs]) + " |")
    return "\n".join(lines)


def estimate_table(records: list[Record]) -> str:
    """Return the correlation of the label-free estimates with purity over all runs, and per dataset."""
    from scipy.stats import spearmanr

    lines = ["| runs | n | neighbor agreement | queue agreement |", "|---|--:|--:|--:|"]
    for data in ("all", *DATA):
        runs = [r for r in records if data in ("all", r["data"]) and r["neighbor_purity"] is not None]
        runs = [r for r in runs if r["neighbor_agreement"] is not None and r.get("queue_agreement") is not None]
        if len(runs) > 2:
            purity = [r["neighbor_purity"] for r in runs]
            cells = [
                spearmanr([r[name] for r in runs], purity)[0] for name in ("neighbor_agreement", "queue_agreement")
            ]
            lines.append(f"| {data} | {len(runs)} | {cells[0]:.2f} | {cells[1]:.2f} |")
    return "\n".join(lines)


# Figures.


def gains(records: list[Record]) -> list[dict[str, Any]]:
    """Return, for each setting of the sweep and for SimCLR, the runs and the paired gains of both metrics over none."""
    groups: dict[tuple[Any, ...], dict[int, Record]] = defaultdict(dict)
    for r in records:
        is_simclr = (r["stage"], r["row"]) == ("ladder", "simclr")
        if is_simclr or r["stage"] in ("sweep", "agreeing", "gate"):
            view = tuple((name, r["settings"][name]) for name in ("views", "crop_min") if name in r["settings"])
            row = f"agreeing {r['row']}" if r["stage"] == "agreeing" else r["row"]
            row = f"gated {row}" if "min_agreement" in r["settings"] else row
            row = f"late {row}" if "neighbor_free_epochs" in r["settings"] else row
            k = None if row == "none" else r["settings"].get("neighbors")
            groups[r["data"], view, k, row][r["seed"]] = r
    points = []
    for (data, view, k, row), runs in groups.items():
        base = groups.get((data, view, None, "none"))
        if row == "none" or not base:
            continue
        runs = {seed: r for seed, r in runs.items() if seed in base}
        if runs:
            metrics = [name for name in METRICS if name in next(iter(runs.values()))]
            pairs = [paired(*({s: r[name] for s, r in each.items()} for each in (runs, base))) for name in metrics]
            views = ", ".join(f"{name} {value}" for name, value in view) or "the dataset's"
            points.append({"data": data, "views": views, "k": k, "row": row, "runs": runs, "pairs": pairs})
    return sorted(points, key=lambda point: (point["data"], point["views"], point["k"] or 0, point["row"]))


def draw_gain(records: list[Record], file: Path) -> None:
    """Draw the gain over none against the purity of the neighbors."""
    from matplotlib.lines import Line2D

    from snclr.reports.figures.drawing import FAINT, GRID, INK, new_figure, save_png

    points = gains(records)
    if not points:
        return
    figure = new_figure(7.2, 4.4, dpi=130)
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.76))
    axes.axhline(0, color=FAINT, linewidth=1)
    for data in MARKERS:
        for row in ("soft-max", "hard"):
            for kind in ("", "agreeing ", "late "):
                own = [p for p in points if p["data"] == data and p["row"] == kind + row]
                x = [100 * statistics.fmean(r["neighbor_purity"] for r in p["runs"].values()) for p in own]
                axes.scatter(
                    x, [p["pairs"][0]["mean"] for p in own], marker=MARKERS[data], s=46, edgecolor=COLORS[row],
                    facecolor="none" if kind else COLORS[row], alpha=0.85,
                )  # fmt: skip
    for data in ("coil100", "cifar5", "omniglot"):
        tests = _rows_of(records, "test", data)
        metric = "knn" if data == "cifar5" else "one_label"
        base = {seed: r[metric] for seed, r in tests["none"].items()}
        for row in ("soft-max", "hard"):
            runs = tests[row].values()
            gain = paired({r["seed"]: r[metric] for r in runs}, base)
            purity = [100 * r["neighbor_purity"] for r in runs if r["neighbor_purity"] is not None]
            assert gain is not None
            axes.scatter(
                [statistics.fmean(purity)], [gain["mean"]], marker=MARKERS[data], s=60, linewidth=1.6, edgecolor=INK,
                facecolor=COLORS[row],
            )  # fmt: skip
    axes.set(xlabel="neighbor purity in the last epoch (%)", ylabel="gain over no neighbors (points)")
    axes.set_title("Gain from neighbors against their purity", loc="left", fontsize=11.5, color=INK)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    shown = {point["data"] for point in points}
    keys = [Line2D([], [], color=FAINT, marker=MARKERS[data], ls="", label=data) for data in MARKERS if data in shown]
    keys += [Line2D([], [], color=COLORS[row], marker="o", ls="", label=words)
             for row, words in (("soft-max", "soft"), ("hard", "hard"))]  # fmt: skip
    keys += [Line2D([], [], color="none", markeredgecolor=INK, markeredgewidth=1.6, marker="o", label="tuned")]
    axes.legend(handles=keys, frameon=False, fontsize=8.5, ncols=2)
    save_png(figure, file)


def draw_estimate(records: list[Record], file: Path) -> None:
    """Draw purity against the label-free agreement, one point per run."""
    from snclr.reports.figures.drawing import GRID, INK, new_figure, save_png

    runs = [r for r in records if r["neighbor_purity"] is not None and r["neighbor_agreement"] is not None]
    if not runs:
        return
    figure = new_figure(7.2, 4.4, dpi=130)
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.76))
    for data in MARKERS:
        own = [r for r in runs if r["data"] == data]
        if own:
            axes.scatter(
                [100 * r["neighbor_agreement"] for r in own], [100 * r["neighbor_purity"] for r in own],
                marker=MARKERS[data], s=26, color=COLORS[data], alpha=0.6, label=data,
            )  # fmt: skip
    axes.set(xlabel="neighbor agreement of two views (%)", ylabel="neighbor purity (%)", xlim=(0, 100), ylim=(0, 100))
    axes.set_title("Purity against its estimate without labels, last epoch", loc="left", fontsize=11.5, color=INK)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)
    save_png(figure, file)


SECTIONS: dict[str, Callable[[list[Record]], str]] = {
    "accuracy": accuracy_tables, "tuning": tuning_table, "sweep": sweep_table, "ablations": ablation_table,
    "estimate": estimate_table, "ladder": ladder_table, "main": main_table,
    "gate": gate_table, "search": search_table, "weights": weights_table, "coverage": coverage_table,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
