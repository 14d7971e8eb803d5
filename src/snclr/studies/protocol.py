"""What is written about a study: the records of its rows, their tuning and budget, and the protocol in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from snclr.data.validation_split import VALIDATION_SHARE
from snclr.errors import count
from snclr.studies.conditions import CALIBRATION_STEPS, count_trials, measured_seconds
from snclr.studies.records import SCHEMA
from snclr.studies.runs import Run
from snclr.studies.study import Study

_UNITS = {
    "steps": "optimizer steps",
    "images": "images seen (full-size views; a smaller view counts by its pixels)",
    "seconds": "seconds (CPU seconds of the training process, on a GPU wall time)",
}


@dataclass
class StageResults:
    """What a study measured before it trained the rows of its table."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Epochs of each row by the budget; rows without an entry have their own."""
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The record of the measured steps of each row."""
    trials: dict[str, list[tuple[dict[str, Any], Run]]] = field(default_factory=dict)
    """What each tuning run of a row tries, and the run."""
    scores: dict[str, float] = field(default_factory=dict)
    """Validation kNN by key of the tuning run."""
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """The reason of each failed run or row, by its title."""


def study_record(study: Study, runs: Sequence[Run], stages: StageResults) -> dict[str, Any]:
    """Return the study as it is written: the records of each row by seed, and the text of the table."""
    rows = [
        {
            "label": row.label, "settings": row.settings, "tuned": dict(stages.chosen.get(row.label, {})),
            "records": {str(run.seed): run.record_name for run in runs if run.label == row.label},
            **({"trials": trials} if (trials := _trials(stages, row.label)) else {}),
            **({"paper": row.paper} if row.paper else {}),
            **({"untrained": True} if row.untrained else {}),
        }
        for row in study.rows
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "name": study.name, "title": study.title, "kind": study.evaluation.kind,
        "command": study.command, "rule": study.rule, "seeds": study.options.seed_list, "rows": rows,
        "protocol": _protocol(study, runs), "notes": study.notes, "budget": _budget(study, stages),
        "chance": study.data.chance,
    }  # fmt: skip


def _trials(stages: StageResults, label: str) -> list[dict[str, Any]]:
    """Return the tuning trials of a row; knn is None if the run failed."""
    return [
        {"settings": settings, "seed": run.seed, "knn": stages.scores.get(run.key), "record": run.record_name}
        for settings, run in stages.trials.get(label, [])
    ]


def _budget(study: Study, stages: StageResults) -> dict[str, Any]:
    """Return the budget, the epochs it gives to each row, and the calibration they were computed from."""
    calibration = {
        label: {"seconds_per_step": measured_seconds(record), "where": record["where"], "time": record.get("time")}
        for label, record in stages.calibration.items()
    }
    budget = {"kind": study.budget.kind, "amount": study.budget.amount, "epochs": stages.epochs}
    return {**budget, "calibration": calibration} if calibration else budget


def _protocol(study: Study, runs: Sequence[Run]) -> list[str]:
    """Describe what all rows share, how they were tuned, and how they differ."""
    trained = [run for run in runs if not run.evaluation.untrained]
    if not trained:
        return []
    s = trained[0].settings

    def is_shared(name: str, of: Sequence[Run] = trained) -> bool:
        return len({repr(run.settings[name]) for run in of}) == 1

    length = count(study.steps(trained[0]), "step")
    if study.evaluation.kind != "cost":
        length = f"{count(s['epochs'], 'epoch')} ({length})"
    parts = [
        f"{s['encoder']} at {s['image_size']} px" if is_shared("encoder", runs) else f"{s['image_size']} px",
        f"{study.data.images:,} images of {study.data.name}",
        *([f"views {s['views']}"] if is_shared("views") else []),
        f"batch {s['batch_size']}",
        *([length] if is_shared("epochs") else []),
    ]
    seeds = study.options.seed_list
    named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    lines = [f"same for all rows: {', '.join(parts)}; {named}"]
    lines += _budget_lines(study, trained) + _tuning_lines(study)
    if differences := _differences(trained):
        lines.append("rows differ in: " + "; ".join(f"{label}: {text}" for label, text in differences.items()))
    else:
        lines.append(f"optimizer and base learning rate of all rows: {s['optimizer']}, lr {s['lr']:g}")
    return lines


def _budget_lines(study: Study, trained: Sequence[Run]) -> list[str]:
    """Describe the budget, unless it is the usual one: the same epochs for all rows."""
    budget, epochs = study.budget, {run.label: int(run.settings["epochs"]) for run in trained}
    if study.evaluation.kind != "test" or (budget.kind == "steps" and len(set(epochs.values())) == 1):
        return []
    texts = ", ".join(f"{label} {number}" for label, number in epochs.items())
    if budget.kind == "steps" and budget.amount is None:
        return [f"epochs of the rows, as in the paper: {texts}"]
    amount = "" if budget.amount is None else f" of {budget.amount:,.10g}"
    measured = f", by {CALIBRATION_STEPS} measured steps of each row" if budget.kind == "seconds" else ""
    return [f"equal budget{amount} in {_UNITS[budget.kind]}, to the nearest whole epoch{measured}: {texts}"]


def _tuning_lines(study: Study) -> list[str]:
    if not study.axes:
        default = "equal tuning effort: none; each method with its default settings and those above"
        return [default] if study.evaluation.kind == "test" else []
    seen = "which the tuning runs do not train on" if study.fit else "seen in pre-training without their labels"
    return [
        f"equal tuning effort: the same {count_trials(study.axes)} trials per row ({'; '.join(map(str, study.axes))}),"
        f" one run each with seed {study.tune_seed} (further seeds if a method lacks a setting), chosen by kNN on"
        f" {VALIDATION_SHARE:.0%} of each training class, {seen}; the test images were not used"
    ]


def _differences(runs: Sequence[Run]) -> dict[str, str]:
    """Return the settings that differ between rows, by row; later rows of a method list only what they change."""
    rows = {run.label: run.settings for run in runs}
    known = dict.fromkeys(name for row in rows.values() for name in row if name not in ("seed", "method", "epochs"))
    names = [name for name in known if len({repr(row.get(name)) for row in rows.values()}) > 1]
    first_row: dict[Any, str] = {}
    result: dict[str, str] = {}
    for label, row in rows.items():
        first = first_row.setdefault(row["method"], label)
        new = [n for n in names if n in row and (first == label or repr(row[n]) != repr(rows[first].get(n)))]
        if text := ", ".join(f"{n}={row[n]}" for n in new):
            result[label] = text if first == label else f"as {first}, but {text}"
    return result
