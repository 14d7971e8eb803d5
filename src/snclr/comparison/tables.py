"""From a study and its records to a table: as plain data (JSON), as text for a terminal, and as markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from snclr.comparison.statistics import Paired, paired, summarise
from snclr.comparison.store import Records

METRICS = {"knn": "kNN top-1", "linear": "linear top-1"}


def build_table(study: dict[str, Any], records: Records) -> dict[str, Any]:
    """All numbers of a study's table, from the records of its runs; rows without any keep their label alone."""
    found = records.of_rows(study)
    kind = study["kind"]
    metrics = ["seconds_per_step"] if kind == "cost" else [m for m in METRICS if any(m in _numbers(f) for f in found)]
    rows = []
    for row, own in zip(study["rows"], found, strict=True):
        made: dict[str, Any] = {
            "label": row["label"],
            "seeds": sorted(own),
            "missing": [seed for seed in study["seeds"] if seed not in own],
            "tuned": row["tuned"],
        }
        for metric in metrics:
            values = _by_seed(own, _number(metric))
            if values:
                made[metric] = {"by_seed": values, **asdict(summarise(list(values.values())))}
                first = _by_seed(found[0], _number(metric))
                made[f"{metric}_difference"] = _difference(paired(values, first)) if own is not found[0] else None
        for name, pick in _COSTS.items():
            if values := _by_seed(own, pick):
                made[name] = {"by_seed": values, **asdict(summarise(list(values.values())))}
        rows.append(made)
    return {
        **{name: study[name] for name in ("name", "title", "kind", "command", "rule", "seeds", "protocol")},
        "metrics": metrics,
        "rows": rows,
        "protocols": _first_protocols(found),
        "notes": [*study["notes"], *_cost_notes(found), *_missing(rows)],
    }


_COSTS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "seconds": lambda r: r["cost"].get("seconds"),
    "cpu_seconds": lambda r: r["cost"].get("cpu_seconds"),
    "peak_mb": lambda r: r["cost"].get("peak_mb"),
    "queue_mb": lambda r: r["cost"].get("queue_mb"),
    "purity": lambda r: _end_of(r.get("series", {}).get("same_class")),
}


def _end_of(series: Sequence[float | None] | None) -> float | None:
    """The mean of the last tenth of a series: one batch alone is noise."""
    values = [value for value in (series or [])[-max(1, len(series or []) // 10) :] if value is not None]
    return sum(values) / len(values) if values else None


def _number(metric: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: record["numbers"].get(metric)


def _numbers(records: Mapping[int, dict[str, Any]]) -> set[str]:
    return {name for record in records.values() for name in record["numbers"]}


def _by_seed(records: Mapping[int, dict[str, Any]], pick: Callable[[dict[str, Any]], float | None]) -> dict[int, float]:
    values = {seed: pick(record) for seed, record in sorted(records.items())}
    return {seed: value for seed, value in values.items() if value is not None}


def _difference(found: Paired | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "verdict": found.verdict}


def _first_protocols(found: Sequence[Mapping[int, dict[str, Any]]]) -> list[str]:
    """How the numbers were measured: equal for all runs, but for what a protocol says it chose by itself."""
    first = next((record for row in found for record in row.values()), None)
    return [f"in the first run, and so in all: {words}" for words in first["protocols"].values()] if first else []


def _cost_notes(found: Sequence[Mapping[int, dict[str, Any]]]) -> list[str]:
    """What the seconds and megabytes mean, and a warning where they were not measured alike."""
    records = [record for row in found for record in row.values()]
    if not records:
        return []
    memory = {"cuda": "torch's tensors on the GPU", "process": "the training process, without loader processes"}
    kinds = " and ".join(memory[kind] for kind in sorted({record["cost"]["memory"] for record in records}))
    where = [record["where"] for record in records]
    machine = f"{where[0]['device']}, {where[0]['threads']} threads, {where[0]['jobs']} run(s) at a time"
    notes = [f"seconds: wall clock of the training (CPU seconds: of its process); peak MB: {kinds}; on {machine}"]
    if any(other != where[0] for other in where):
        names = sorted({n for other in where for n in {*other, *where[0]} if other.get(n) != where[0].get(n)})
        notes.append(f"the runs were not all made alike ({', '.join(names)} differ): their seconds cannot be compared")
    if any(record["cost"].get("attempts", 1) > 1 for record in records):
        notes.append("some runs were interrupted and resumed; their seconds are the sum of the parts")
    return notes


def _missing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    gaps = [f"{row['label']} (seeds {', '.join(map(str, row['missing']))})" for row in rows if row["missing"]]
    return [f"not finished: {'; '.join(gaps)}"] if gaps else []


# ---- for people


def text(table: Mapping[str, Any]) -> str:
    """The table for a terminal, with what its numbers mean."""
    blocks = [table["title"], *(_aligned(*part) for part in _parts(table))]
    words = [*table["protocol"], *([f"rule: {table['rule']}"] if table["rule"] else []), *table["protocols"]]
    blocks.append("\n".join(f"  {line}" for line in [*words, *table["notes"]]))
    return "\n\n".join(blocks)


def markdown(table: Mapping[str, Any]) -> str:
    """The table for a page, with what its numbers mean and the command that makes it."""
    blocks = [_piped(*part) for part in _parts(table)]
    words = [*table["protocol"], *([f"rule: {table['rule']}"] if table["rule"] else []), *table["protocols"]]
    lines = "\n".join(f"- {line}" for line in [*words, *table["notes"]])
    blocks.append(f"<details><summary>How it was measured</summary>\n\n{lines}\n\n</details>")
    if table["command"]:
        blocks.append(f"```\n{table['command']}\n```")
    return "\n\n".join(blocks) + "\n"


def _parts(table: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Heads and rows: the means and costs, then the differences seed by seed."""
    if table["kind"] == "cost":
        return [_cost_part(table)]
    parts = [_mean_part(table)]
    if len(table["rows"]) > 1 and table["metrics"]:
        parts += [_paired_part(table, metric) for metric in table["metrics"]]
    return parts


def _mean_part(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    purity = any("purity" in row for row in table["rows"])
    tuned = any(row["tuned"] for row in table["rows"])
    heads = ["row", *(METRICS[m] for m in table["metrics"]), *(["right neighbours"] if purity else [])]
    cpu = all("cpu_seconds" in row for row in table["rows"])
    heads += [*(["chosen"] if tuned else []), "seconds", *(["CPU seconds"] if cpu else []), "peak MB", "seeds"]
    rows = []
    for row in table["rows"]:
        line = [row["label"], *(_spread(row.get(m), _percent) for m in table["metrics"])]
        line += [_spread(row.get("purity"), _percent)] if purity else []
        line += [", ".join(f"{n}={v}" for n, v in row["tuned"].items()) or "–"] if tuned else []
        costs = ("seconds", *(("cpu_seconds",) if cpu else ()), "peak_mb")
        line += [*(_spread(row.get(name), _whole) for name in costs), str(len(row["seeds"]))]
        rows.append(line)
    return heads, rows


def _paired_part(table: Mapping[str, Any], metric: str) -> tuple[list[str], list[list[str]]]:
    """Each row minus the first, seed by seed, in percentage points."""
    seeds = table["seeds"]
    heads = [f"{METRICS[metric]} minus {table['rows'][0]['label']}", *(f"seed {seed}" for seed in seeds)]
    heads += ["mean ± sd", "95 % interval", "verdict"]
    rows = []
    for row in table["rows"][1:]:
        found = row.get(f"{metric}_difference")
        if found is None:
            rows.append([row["label"], *("–" for _ in seeds), "–", "–", "not finished"])
            continue
        by_seed = [_points(found["by_seed"].get(seed)) for seed in seeds]
        sd = "" if found["sd"] is None else f" ± {100 * found['sd']:.2f}"
        low_high = found["interval"]
        interval = "–" if low_high is None else f"{_points(low_high[0])} to {_points(low_high[1])}"
        rows.append([row["label"], *by_seed, _points(found["mean"]) + sd, interval, found["verdict"]])
    return heads, rows


def _cost_part(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["row", "queue MB", "peak MB", "peak over first", "seconds a step", "over first"]
    rows = []
    first = table["rows"][0]
    for row in table["rows"]:
        more, slower = "–", "–"
        if row is not first and "peak_mb" in row and "peak_mb" in first:
            more = f"{row['peak_mb']['mean'] - first['peak_mb']['mean']:+.1f}"
            slower = f"{row['seconds_per_step']['mean'] / first['seconds_per_step']['mean'] - 1:+.1%}"
        rows.append(
            [
                row["label"],
                _spread(row.get("queue_mb"), lambda value: f"{value:.2f}", spread=False),
                _spread(row.get("peak_mb"), lambda value: f"{value:.1f}"),
                more,
                _spread(row.get("seconds_per_step"), lambda value: f"{value:.4f}"),
                slower,
            ]
        )
    return heads, rows


def _spread(found: Mapping[str, Any] | None, form: Callable[[float], str], *, spread: bool = True) -> str:
    """Mean ± standard deviation; the mean alone with one seed; a dash for nothing."""
    if found is None:
        return "–"
    sd = found["sd"]
    return form(found["mean"]) + (f" ± {form(sd)}" if spread and sd is not None else "")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.2f}"


def _aligned(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    lines = [heads, ["─" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ).replace(" \n", "\n")


def _piped(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
