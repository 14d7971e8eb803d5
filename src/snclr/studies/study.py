"""A study: rows × seeds with equal settings except for what is compared; tuned, run and written as one table."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from snclr.data.info import DatasetInfo, dataset_name
from snclr.errors import UserError
from snclr.io.atomic import check_writable, write_atomic
from snclr.io.locking import FileLock, lock_folder
from snclr.methods import METHODS
from snclr.runtime.stop import StopRequested
from snclr.studies.options import StudyOptions
from snclr.studies.records import SCHEMA, Records, write_record
from snclr.studies.runner import Outcome, execute
from snclr.studies.runs import ASSIGNED, TUNE_SEED, VALIDATION_SHARE, Evaluation, Row, Run, make_run
from snclr.train.config import resolve, settings_for_method

_TRIAL_STEPS = 5


@dataclass(frozen=True)
class Study:
    """What is compared. `settings` apply to all rows; with a `grid`, each row is tuned over its entries."""

    options: StudyOptions
    name: str
    title: str
    rows: list[Row]
    settings: dict[str, Any]
    evaluation: Evaluation
    data: DatasetInfo
    command: str
    """Command line that repeats the study."""
    rule: str = ""
    """How the values of an ablation were scaled to the dataset."""
    grid: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks for the protocol."""

    def __post_init__(self) -> None:
        name = self.name
        if not name.isprintable() or name[:1] in ("", ".") or set(name) & set("/\\") or len(name.encode()) > 150:
            raise UserError(f"--name {name!r} is not a valid file name. Use letters, digits, spaces and dashes.")

    def steps(self, run: Run) -> int:
        """Return the number of training steps of a run."""
        from snclr.data.sampler import steps_per_epoch

        if run.evaluation.kind == "cost":
            return run.evaluation.steps
        return int(run.settings["epochs"]) * steps_per_epoch(self.data.images, int(run.settings["batch_size"]))

    def images(self, run: Run) -> int:
        """Return the number of images a run trains on, over all epochs."""
        return self.steps(run) * int(run.settings["batch_size"])

    def tuning_runs(self) -> list[Run]:
        """Return the runs that choose a setting per row: the same grid and seed, evaluated on validation images."""
        evaluation = replace(self.evaluation, kind="validation")
        return [self._run(row, TUNE_SEED, evaluation, **choice) for row in self.rows for choice in self.grid]

    def runs(self, chosen: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """Return the runs of the table, seed by seed, so that an interrupted study has complete seeds."""
        rows = [row for row in self.rows if not self.grid or row.label in chosen]
        runs = ((seed, row) for seed in self.options.seed_list for row in rows)
        return [self._run(row, seed, self.evaluation, **chosen.get(row.label, {})) for seed, row in runs]

    def _run(self, row: Row, seed: int, evaluation: Evaluation, **overrides: Any) -> Run:
        return make_run(row, seed, self.settings, data=self.data.fingerprint, evaluation=evaluation, **overrides)


@dataclass(frozen=True)
class StudyResult:
    """The table of a study, the files it was written to, and the runs that failed."""

    table: dict[str, Any]
    """Rows, statistics and protocol, as written to the JSON file."""
    files: dict[str, str]
    failed: dict[str, str]
    """The reason of each failed run, by its title."""

    @property
    def exit_code(self) -> int:
        """1 if a run failed, else 0."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**self.table, "exit_code": self.exit_code, "failed": self.failed, "files": self.files}


@dataclass(frozen=True)
class StudyEstimate:
    """What a study would train and how long it would take."""

    title: str
    rule: str
    runs: list[dict[str, Any]]
    """Title, directory and whether it is finished, for each run."""
    pending: int
    tuning: int
    """Runs that only choose hyperparameters."""
    seconds: float | None
    """Expected duration of the pending runs; None if the trial steps failed."""
    how: str
    """What `seconds` is derived from."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"exit_code": 0, "dry_run": True, **asdict(self)}


def check_settings(settings: Mapping[str, Any], rows: Sequence[Row], grid: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise UserError for settings that are invalid, unused or assigned by the study, and rows that cannot be tuned."""
    for name, instead in ASSIGNED.items():
        if name in settings:
            raise UserError(f"--{name} cannot be set in a comparison: {instead}")
    methods = list(dict.fromkeys(row.settings["method"] for row in rows))
    used = {name for method in methods for name in settings_for_method(method, settings)}
    if unused := [name for name in settings if name not in used]:
        raise UserError(f"none of the methods ({', '.join(methods)}) uses {unused[0]}; leave the flag out")
    for method in methods:
        resolve({**settings_for_method(method, settings), "method": method})
    for row in rows if grid else ():
        if METHODS[row.settings["method"]].needs_labels:
            raise UserError(
                f"--tune cannot be used with the method {row.settings['method']}, which trains on the very labels that"
                " select the setting. Compare it in a separate command."
            )
        if both := set(grid[0]) & set(row.settings):
            raise UserError(f"{row.label!r} and --tune both set {sorted(both)[0]}; leave one of them out")


def run_study(study: Study) -> StudyResult | StudyEstimate:
    """Tune, train and evaluate the pending runs, then write table and figures. Raise StopRequested after a stop.

    A dry run only estimates the duration.
    """
    if study.options.dry_run:
        return estimate_study(study)
    options, records, out = study.options, study.options.records, Path(study.options.out)
    lock = FileLock(out / ".snclr-compare.lock")
    lock_folder(lock, "another comparison", "choose another --out folder")
    try:
        check_writable(records.folder / "record", "choose another --results folder")
        tuning = study.tuning_runs()
        tuned = execute(tuning, options, study.images)
        if tuned.stopped_by is not None:
            raise StopRequested(tuned.stopped_by)
        chosen = _choose(study, tuning, tuned)
        runs = study.runs(chosen)
        outcome = execute(runs, options, study.images)
        untuned = [row.label for row in study.rows if study.grid and row.label not in chosen]
        outcome.failed |= dict.fromkeys(untuned, "all of its tuning runs failed")
        description = describe(study, runs, chosen)
        write_record(description, records.studies / f"{study.name}.json")
        files, table = write_files(description, records, out)
    finally:
        lock.release()
    if outcome.stopped_by is not None:
        raise StopRequested(outcome.stopped_by)
    return StudyResult(table, files, outcome.failed)


def estimate_study(study: Study) -> StudyEstimate:
    """Estimate the time of a study from its finished runs, or from a few steps of its first run; write nothing."""
    tuning = study.tuning_runs()
    runs = tuning + study.runs({row.label: study.grid[0] if study.grid else {} for row in study.rows})
    records = {run.key: study.options.records.find(run) for run in runs}
    pending = [run for run in runs if records[run.key] is None]
    rates = [r["cost"]["seconds"] / study.images(run) for run in runs if (r := records[run.key])]
    source = "from the finished runs"
    if not rates and pending:
        rates = _measure_rate(pending[0])
        source = f"from a few steps of {pending[0].label}; other rows may differ"
    return StudyEstimate(
        study.title, study.rule,
        runs=[{"run": r.title, "folder": r.folder, "finished": records[r.key] is not None} for r in runs],
        pending=len(pending), tuning=len(tuning),
        seconds=sum(map(study.images, pending)) * sum(rates) / len(rates) / study.options.jobs if rates else None,
        how=source if rates else "unknown: the trial steps failed",
    )  # fmt: skip


def _measure_rate(run: Run) -> list[float]:
    """Return the seconds per image of a few steps in a subprocess; [] if it failed."""
    trial = replace(run, evaluation=Evaluation(kind="cost", steps=_TRIAL_STEPS))
    with tempfile.TemporaryDirectory(prefix="snclr-dry-run-", ignore_cleanup_errors=True) as folder:
        record = execute([trial], StudyOptions(out=folder, quiet=True), lambda _: 1).records.get(trial.key)
    return [record["numbers"]["seconds_per_step"] / run.settings["batch_size"]] if record else []


def _choose(study: Study, tuning: list[Run], tuned: Outcome) -> dict[str, dict[str, Any]]:
    """Return for each row the overrides with the best validation kNN; the first of equals."""
    scores: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for number, run in enumerate(tuning):
        if (record := tuned.records.get(run.key)) is not None:
            choice = study.grid[number % len(study.grid)]
            scores.setdefault(run.label, []).append((record["numbers"]["knn"], choice))
    return {label: max(trials, key=lambda trial: trial[0])[1] for label, trials in scores.items()}


def describe(study: Study, runs: Sequence[Run], chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the study as it is written: the records of each row by seed, and the text of the table."""
    rows = [
        {
            "label": row.label, "settings": row.settings, "tuned": dict(chosen.get(row.label, {})),
            "records": {str(run.seed): run.record for run in runs if run.label == row.label},
        }
        for row in study.rows
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "name": study.name, "title": study.title, "kind": study.evaluation.kind,
        "command": study.command, "rule": study.rule, "seeds": study.options.seed_list, "rows": rows,
        "protocol": _protocol(study, runs), "notes": study.notes,
    }  # fmt: skip


def _protocol(study: Study, runs: Sequence[Run]) -> list[str]:
    """Describe what all rows share, how they were tuned, and how they differ."""
    if not runs:
        return []
    s, steps = runs[0].settings, study.steps(runs[0])
    trained = f"{steps} steps" if study.evaluation.kind == "cost" else f"{s['epochs']} epochs ({steps:,} steps)"
    lines = [
        f"same for all rows: {s['encoder']} at {s['image_size']} px, {study.data.images:,} images of"
        f" {study.data.name}, views {s['views']}, batch {s['batch_size']}, {trained};"
        f" seeds {', '.join(map(str, study.options.seed_list))}"
    ]
    if study.grid:
        values = {name: ", ".join(str(v) for v in dict.fromkeys(g[name] for g in study.grid)) for name in study.grid[0]}
        grid = ", ".join(f"{name} in {{{choices}}}" for name, choices in values.items())
        lines.append(
            f"equal tuning effort: the same {len(study.grid)} trials per row ({grid}), one run each with seed"
            f" {TUNE_SEED}, chosen by kNN on {VALIDATION_SHARE:.0%} of each training class; the test images were not"
            " used"
        )
    elif study.evaluation.kind == "test":
        lines.append("equal tuning effort: none; each method with its default settings and those above")
    if differences := _differences(runs):
        lines.append("rows differ in: " + "; ".join(f"{label}: {text}" for label, text in differences.items()))
    else:
        lines.append(f"optimizer and base learning rate of all rows: {s['optimizer']}, lr {s['lr']:g}")
    return lines


def _differences(runs: Sequence[Run]) -> dict[str, str]:
    """Return the settings that differ between rows, by row; later rows of a method list only what they change."""
    rows = {run.label: run.settings for run in runs}
    known = dict.fromkeys(name for row in rows.values() for name in row if name not in ("seed", "method"))
    names = [name for name in known if len({repr(row.get(name)) for row in rows.values()}) > 1]
    first_row: dict[Any, str] = {}
    result: dict[str, str] = {}
    for label, row in rows.items():
        first = first_row.setdefault(row["method"], label)
        new = [n for n in names if n in row and (first == label or repr(row[n]) != repr(rows[first].get(n)))]
        if text := ", ".join(f"{n}={row[n]}" for n in new):
            result[label] = text if first == label else f"as {first}, but {text}"
    return result


def write_files(study: dict[str, Any], records: Records, out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Write the table (JSON, Markdown) and the figures under the study's name; return their paths and the table."""
    from snclr.reports.figures.comparison import draw_comparison, draw_neighbor_purity
    from snclr.studies.tables import build_table, markdown

    table = build_table(study, records)
    stem = out / study["name"]
    files = {"markdown": f"{stem}.md", "json": f"{stem}.json"}
    write_atomic(files["markdown"], markdown(table))
    write_atomic(files["json"], json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    if draw_comparison(table, f"{stem}.png"):
        files["figure"] = f"{stem}.png"
    if draw_neighbor_purity(study, records.by_row(study), f"{stem}-purity.png"):
        files["purity"] = f"{stem}-purity.png"
    return files, table


def command_line(command: str, given: Mapping[str, Any]) -> str:
    """Return the command that makes a study, to be stored with its results; paths are replaced by dataset names.

    >>> command_line("compare", {"methods": "snclr,byol", "seeds": 3, "data": "/somewhere/photos", "sincos": False})
    'snclr compare --methods snclr,byol --seeds 3 --data photos --no-sincos --out OUT'
    """
    arguments = ["snclr", command]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            arguments += [argument for item in value for argument in (flag, item)]
        elif isinstance(value, (list, tuple)):  # "4," is the list of one seed, "4" a number of seeds
            arguments += [flag, ",".join(map(str, value)) + "," * (len(value) == 1)] if value else []
        elif value is not None:
            is_path = name in ("data", "eval_data", "test", "init_from")
            arguments += [flag, dataset_name(str(value)) if is_path else str(value)]
    return shlex.join([*arguments, "--out", "OUT"])
