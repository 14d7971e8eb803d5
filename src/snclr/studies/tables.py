"""The table of a study, computed from its records: as JSON values, for the terminal, and as markdown."""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from snclr.reports.text import COMPARED, STUDY_METRICS
from snclr.studies.records import Records

_COSTS = ("seconds", "cpu_seconds", "steps", "images", "peak_mb", "queue_mb", "neighbor_purity")
_COST_COLUMNS = (
    ("neighbor purity", "neighbor_purity", ".2f", 100.0),
    ("steps", "steps", ",.0f", 1.0),
    ("images seen", "images", ",.0f", 1.0),
    ("seconds", "seconds", ",.0f", 1.0),
    ("CPU seconds", "cpu_seconds", ",.0f", 1.0),
    ("peak MB", "peak_mb", ",.0f", 1.0),
)
"""Head, name, format and scale of the columns that are shown if a row has them; seconds and peak MB always."""
Part = tuple[list[str], list[list[str]]]
"""Headers and rows of a table."""


def build_table(study: dict[str, Any], records: Records) -> dict[str, Any]:
    """Compute the numbers of a study's table; rows without finished runs have a label only."""
    by_row = records.by_row(study)
    finished = [record for row in by_row for record in row.values()]
    evaluated = {name for record in finished for name in record["numbers"]}
    metrics = ["seconds_per_step"] if study["kind"] == "cost" else [name for name in STUDY_METRICS if name in evaluated]
    rows: list[dict[str, Any]] = []
    for row, by_seed in zip(study["rows"], by_row, strict=True):
        missing = [seed for seed in study["seeds"] if seed not in by_seed]
        cells = {"label": row["label"], "seeds": sorted(by_seed), "missing": missing, "tuned": row["tuned"]}
        cells |= {name: row[name] for name in ("paper", "trials") if name in row}
        for name in (*metrics, *_COSTS):
            values = {seed: v for seed, record in sorted(by_seed.items()) if (v := _value(record, name)) is not None}
            if values:
                cells[name] = {"by_seed": values, **summarize(list(values.values()))}
                if name in metrics:
                    baseline = rows[0].get(name, {}).get("by_seed", {}) if rows else {}
                    cells[f"{name}_difference"] = paired(values, baseline)
        rows.append(cells)
    gaps = [f"{row['label']} (seeds {', '.join(map(str, row['missing']))})" for row in rows if row["missing"]]
    unfinished = [f"not finished: {'; '.join(gaps)}"] if gaps else []
    failed = [row["label"] for row in study["rows"] if any(t["knn"] is None for t in row.get("trials", []))]
    unfinished += [f"not all tuning trials succeeded: {', '.join(failed)}"] if failed else []
    return {
        **{name: study[name] for name in ("name", "title", "kind", "command", "rule", "seeds", "protocol")},
        "budget": study.get("budget", {"kind": "steps"}), "metrics": metrics, "rows": rows,
        "protocols": [f"same for every run: {_shared(text)}" for r in finished[:1] for text in r["protocols"].values()],
        "notes": [*study["notes"], *_cost_notes(finished), *unfinished],
    }  # fmt: skip


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation (n - 1) and number of values; sd is None for one value.

    >>> summarize([1.0, 2.0, 3.0])
    {'mean': 2.0, 'sd': 1.0, 'n': 3}
    """
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}


def paired(row: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any] | None:
    """Return `row` minus `baseline` at their common seeds: mean, sd, 95 % Student's t interval and verdict.

    Pairing removes what a seed does to both rows: image order, views and initial weights. None without a common seed.

    >>> paired({0: 0.7, 1: 0.8}, {0: 0.6, 1: 0.6, 2: 0.9})["verdict"]
    'within noise'
    """
    by_seed = {seed: row[seed] - baseline[seed] for seed in sorted(row) if seed in baseline}
    if not by_seed:
        return None
    summary = summarize(list(by_seed.values()))
    mean, sd, n = summary["mean"], summary["sd"], summary.pop("n")
    result = {"by_seed": by_seed, **summary, "interval": None, "verdict": "one seed: inconclusive"}
    if sd is None:
        return result
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    low, high = mean - half, mean + half
    if sd < 1e-9:  # with few seeds and test images zero variance is a coincidence
        verdict = "equal at all seeds" if abs(mean) < 1e-9 else "no variance over seeds: inconclusive"
    else:
        verdict = "within noise" if low <= 0 <= high else "higher" if low > 0 else "lower"
    return {**result, "interval": (low, high), "verdict": verdict}


def _shared(protocol: str) -> str:
    """Return a protocol without the learning rate that was chosen for one run."""
    return re.sub(r"learning rate \S+, (the best of .*?) \(top-1 [^)]*\)", r"learning rate: \1", protocol)


def _value(record: dict[str, Any], name: str) -> float | None:
    """Return a number of a record. Neighbor purity is the mean of the last tenth of its series: one batch is noisy."""
    if name != "neighbor_purity":
        value: float | None = {**record["cost"], **record["numbers"]}.get(name)
        return value
    series = record.get("series", {}).get("neighbor_purity", [])
    values = [value for value in series[-max(1, len(series) // 10) :] if value is not None]
    return statistics.fmean(values) if values else None


def _cost_notes(records: Sequence[dict[str, Any]]) -> list[str]:
    """Explain the seconds and megabytes, and warn if they were measured under different conditions."""
    if not records:
        return []
    memory = {"cuda": "tensors on the GPU", "process": "the training process, without data workers"}
    kinds = " and ".join(memory[kind] for kind in sorted({record["cost"]["memory"] for record in records}))
    where = [record["where"] for record in records]
    machine = f"{where[0]['device']}, threads: {where[0]['threads']}, runs in parallel: {where[0]['jobs']}"
    notes = [f"seconds: wall time of training (CPU seconds: of its process); peak MB: {kinds}; on {machine}"]
    if any(other != where[0] for other in where):
        names = sorted({n for other in where for n in {*other, *where[0]} if other.get(n) != where[0].get(n)})
        notes.append(f"the conditions of the runs differ ({', '.join(names)}): their timings cannot be compared")
    if any(record["cost"].get("attempts", 1) > 1 for record in records):
        notes.append("some runs were interrupted and resumed; their seconds are summed over all attempts")
    return notes


def markdown(table: Mapping[str, Any]) -> str:
    """Return the table as markdown, with its protocol and command."""
    blocks = [_markdown_table(*part) for part in parts(table)]
    lines = "\n".join(f"- {line}" for line in explanation(table))
    blocks.append(f"<details><summary>How it was measured</summary>\n\n{lines}\n\n</details>")
    if table["command"]:
        blocks.append(f"```\n{table['command']}\n```")
    return "\n\n".join(blocks) + "\n"


def explanation(table: Mapping[str, Any]) -> list[str]:
    """Return how the numbers were measured, line by line."""
    units = "± is the standard deviation over seeds; accuracies and purity are in percent, differences in points"
    rule = [f"rule: {table['rule']}"] if table["rule"] else []
    return [units, *table["protocol"], *rule, *table["protocols"], *table["notes"]]


def parts(table: Mapping[str, Any]) -> list[Part]:
    """Return headers and rows: means and costs, then the paired differences."""
    if table["kind"] == "cost":
        return [_cost_part(table)]
    compared = [metric for metric in table["metrics"] if metric in COMPARED]
    paired_parts = [_paired_part(table, metric) for metric in compared] if len(table["rows"]) > 1 else []
    trials = [_trials_part(table)] if any(row.get("trials") for row in table["rows"]) else []
    return [_mean_part(table), *paired_parts, *trials]


def _mean_part(table: Mapping[str, Any]) -> Part:
    rows = table["rows"]
    columns = [["row", *(row["label"] for row in rows)]]
    for metric in table["metrics"]:
        columns.append([STUDY_METRICS[metric], *(_mean(row, metric, ".2f", 100.0) for row in rows)])
        if any(metric in row.get("paper", {}) for row in rows):
            columns.append(["paper", *(_paper(row, metric) for row in rows)])
    recorded = {name for row in rows for name in row} | {"seconds", "peak_mb"}
    if "images" not in recorded:  # records of earlier versions have none, and no steps are shown
        recorded -= {"steps"}
    for head, name, spec, scale in _COST_COLUMNS:
        if name in recorded:
            columns.append([head, *(_mean(row, name, spec, scale) for row in rows)])
    columns.append(["seeds", *(str(len(row["seeds"])) for row in rows)])
    if any(row["tuned"] for row in rows):
        columns.append(["chosen", *(_settings(row["tuned"]) or "–" for row in rows)])
    heads, *cells = map(list, zip(*columns, strict=True))
    return heads, cells


def _trials_part(table: Mapping[str, Any]) -> Part:
    """Return the validation kNN of every tuning trial; those of the chosen settings have an asterisk."""
    columns = [["tuning: validation kNN (* chosen)", *(row["label"] for row in table["rows"])]]
    by_row = ([_trial(trial, row["tuned"]) for trial in row.get("trials", [])] for row in table["rows"])
    for number, cells in enumerate(itertools.zip_longest(*by_row, fillvalue="–"), start=1):
        columns.append([f"trial {number}", *cells])
    heads, *rows = map(list, zip(*columns, strict=True))
    return heads, rows


def _trial(trial: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    score = "failed" if trial["knn"] is None else f"{100 * trial['knn']:.2f}"
    tried = _settings(trial["settings"]) or f"seed {trial['seed']}"
    return f"{tried}: {score}{'*' * (trial['settings'] == chosen)}"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _paired_part(table: Mapping[str, Any], metric: str) -> Part:
    """Return the differences to the first row by seed, in percentage points."""
    first, seeds = table["rows"][0]["label"], table["seeds"]
    rows = []
    for row in table["rows"][1:]:
        unknown: dict[str, Any] = {"by_seed": {}, "mean": None, "sd": None, "interval": None, "verdict": "not finished"}
        difference = row.get(f"{metric}_difference") or unknown
        sd = "" if difference["sd"] is None else f" ± {100 * difference['sd']:.2f}"
        rows.append([
            row["label"], *(_points(difference["by_seed"].get(seed)) for seed in seeds),
            _points(difference["mean"]) + sd,
            " to ".join(map(_points, difference["interval"])) if difference["interval"] else "–", difference["verdict"],
        ])  # fmt: skip
    heads = [f"{STUDY_METRICS[metric]} minus {first}", *(f"seed {seed}" for seed in seeds)]
    return [*heads, "mean" if len(seeds) == 1 else "mean ± sd", "95 % interval", "verdict"], rows


def _cost_part(table: Mapping[str, Any]) -> Part:
    first = table["rows"][0]
    rows = []
    for row in table["rows"]:
        more, slower = "–", "–"
        if row is not first and "peak_mb" in row and "peak_mb" in first:
            more = f"{row['peak_mb']['mean'] - first['peak_mb']['mean']:+.1f}"
            slower = f"{row['seconds_per_step']['mean'] / first['seconds_per_step']['mean'] - 1:+.1%}"
        queue = f"{row['queue_mb']['mean']:.2f}" if "queue_mb" in row else "–"
        seconds = _mean(row, "seconds_per_step", ".4f")
        paper = [_paper(row, name) for name in ("more_mb", "seconds_per_step")]
        rows.append([row["label"], queue, _mean(row, "peak_mb", ".1f"), more, seconds, slower, *paper])
    heads = ["row", "queue MB", "peak MB", "peak over first", "seconds per step", "over first"]
    if not any(row.get("paper") for row in table["rows"]):
        return heads, [row[: len(heads)] for row in rows]
    return [*heads, "paper: more MB", "paper: seconds per step"], rows


def _mean(row: Mapping[str, Any], name: str, spec: str, scale: float = 1.0) -> str:
    """Format mean ± standard deviation, the mean alone with one seed or if it is exact."""
    if name not in row:
        return "–"
    mean, sd = row[name]["mean"], row[name]["sd"]
    exact = sd is None or (sd == 0 and name in ("steps", "images"))
    return f"{scale * mean:{spec}}" + ("" if exact else f" ± {scale * sd:{spec}}")


def _paper(row: Mapping[str, Any], name: str) -> str:
    """Return the paper's result of a row as given."""
    return str(row.get("paper", {}).get(name, "–"))


def _points(value: float | None) -> str:
    return "–" if value is None else f"{round(100 * value, 2) + 0.0:+.2f}"  # no -0.00


def _markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
