"""A study: rows × seeds with equal settings except for what is compared; tuned, run and written as one table."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.benchmark.plan import TUNE_SEED, VALIDATION_SHARE, Entry, Evaluation, Run, data_name, make_run
from snclr.benchmark.records import SCHEMA, Records
from snclr.benchmark.runner import Outcome, Workspace, execute
from snclr.errors import UserError
from snclr.io.atomic import check_writable, write_atomic
from snclr.io.locking import FileLock, lock_folder
from snclr.methods import METHODS
from snclr.runtime.stop import StopRequested
from snclr.train.config import resolve, settings_for_method

if TYPE_CHECKING:
    from snclr.benchmark.datasets import DatasetInfo

_DECIDED_BY_STUDY = {
    "method": "use --methods",
    "seed": "use --seeds",
    "resume": "the same command continues by itself",
    "overwrite": "finished runs are recognized by their settings",
}


@dataclass(frozen=True)
class Study:
    """What is compared: `common` settings hold for all rows, and each row tries the overrides of `grid` to tune it."""

    name: str
    title: str
    entries: list[Entry]
    seeds: list[int]
    common: dict[str, Any]
    evaluation: Evaluation
    data: DatasetInfo
    command: str = ""
    rule: str = ""
    grid: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def steps(self, run: Run) -> int:
        """Return the training steps of a run."""
        from snclr.data.sampler import steps_per_epoch

        if run.evaluation.kind == "cost":
            return run.evaluation.steps
        return int(run.settings["epochs"]) * steps_per_epoch(self.data.images, int(run.settings["batch_size"]))

    def images(self, run: Run) -> int:
        """Return the images a run trains on, over all epochs."""
        return self.steps(run) * int(run.settings["batch_size"])

    def tuning_runs(self) -> list[Run]:
        """Return the runs that choose a setting per row: the same grid and seed, evaluated on validation images."""
        evaluation = replace(self.evaluation, kind="validation")
        return [self._run(entry, TUNE_SEED, evaluation, **choice) for entry in self.entries for choice in self.grid]

    def runs(self, chosen: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """Return the runs of the table, seed by seed, so that an interrupted study has complete seeds."""
        entries = [entry for entry in self.entries if not self.grid or entry.label in chosen]
        return [
            self._run(entry, seed, self.evaluation, **chosen.get(entry.label, {}))
            for seed in self.seeds
            for entry in entries
        ]

    def _run(self, entry: Entry, seed: int, evaluation: Evaluation, **overrides: Any) -> Run:
        return make_run(entry, seed, self.common, data=self.data.fingerprint, evaluation=evaluation, **overrides)


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


def check_settings(settings: Mapping[str, Any], methods: Sequence[str] = ("snclr",)) -> None:
    """Raise UserError for settings that the study decides itself, that no method uses, or that are not valid."""
    for name, instead in _DECIDED_BY_STUDY.items():
        if name in settings:
            raise UserError(f"--{name} cannot be set in a comparison: {instead}")
    known = [method for method in methods if method in METHODS]
    used = {name for method in known for name in settings_for_method(method, settings)}
    if known and (unused := [name for name in settings if name not in used]):
        raise UserError(f"none of the methods ({', '.join(known)}) uses {unused[0]}; leave the flag out")
    for method in methods:
        resolve({**(settings_for_method(method, settings) if method in known else {}), "method": method})


def check_tuning(entries: Sequence[Entry], grid: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for rows that cannot be tuned over the grid."""
    for entry in entries if grid else ():
        method = entry.settings["method"]
        if method in METHODS and METHODS[method].needs_labels:
            raise UserError(
                f"--tune cannot be used with the method {method}, which trains on the very labels that select the"
                " setting. Compare it in a separate command."
            )
        if both := set(grid[0]) & set(entry.settings):
            raise UserError(f"{entry.label!r} and --tune both set {sorted(both)[0]}; leave one of them out")


def run_study(study: Study, workspace: Workspace) -> StudyResult:
    """Tune, train and evaluate the pending runs, then write table and figures. Raise StopRequested after a stop."""
    _check_run(study, workspace)
    lock = FileLock(workspace.out / ".snclr-compare.lock")
    lock_folder(lock, "another comparison", "choose another --out folder")
    try:
        check_writable(workspace.records.folder / "record", "choose another --results folder")
        tuning = study.tuning_runs()
        tuned = execute(tuning, workspace, study.images)
        if tuned.stopped_by is not None:
            raise StopRequested(tuned.stopped_by)
        chosen = _choose(study, tuning, tuned)
        runs = study.runs(chosen)
        outcome = execute(runs, workspace, study.images)
        untuned = [entry.label for entry in study.entries if study.grid and entry.label not in chosen]
        outcome.failed |= dict.fromkeys(untuned, "all of its tuning runs failed")
        description = describe(study, runs, chosen)
        workspace.records.write(description, workspace.records.studies / f"{study.name}.json")
        files, table = write_files(description, workspace.records, workspace.out)
    finally:
        lock.release()
    if outcome.stopped_by is not None:
        raise StopRequested(outcome.stopped_by)
    return StudyResult(table, files, outcome.failed)


def estimate_study(study: Study, workspace: Workspace) -> StudyEstimate:
    """Estimate the time of a study from its finished runs, or from a few steps of its first run; write nothing."""
    from snclr.benchmark.cost import WARMUP_STEPS

    _check_run(study, workspace)
    tuning = study.tuning_runs()
    runs = tuning + study.runs({entry.label: study.grid[0] if study.grid else {} for entry in study.entries})
    records = {run.key: workspace.records.find(run) for run in runs}
    pending = [run for run in runs if records[run.key] is None]
    rates = [r["cost"]["seconds"] / study.images(run) for run in runs if (r := records[run.key])]
    source = "from the finished runs"
    if not rates and pending:
        rates = _measure_rate(pending[0])
        source = f"from {WARMUP_STEPS + 5} steps of {pending[0].label}; other rows may differ"
    return StudyEstimate(
        study.title, study.rule,
        runs=[{"run": r.title, "folder": r.folder, "finished": records[r.key] is not None} for r in runs],
        pending=len(pending), tuning=len(tuning),
        seconds=sum(map(study.images, pending)) * sum(rates) / len(rates) / workspace.jobs if rates else None,
        how=source if rates else "unknown: the trial steps failed",
    )  # fmt: skip


def _measure_rate(run: Run) -> list[float]:
    """Return the seconds per image of a few steps in a subprocess; [] if it failed."""
    trial = replace(run, evaluation=Evaluation(kind="cost", steps=5))
    with tempfile.TemporaryDirectory(prefix="snclr-dry-run-", ignore_cleanup_errors=True) as folder:
        workspace = Workspace(Path(folder), Records(folder), quiet=True)
        record = execute([trial], workspace, lambda _: 1).records.get(trial.key)
    return [record["numbers"]["seconds_per_step"] / run.settings["batch_size"]] if record else []


def _check_run(study: Study, workspace: Workspace) -> None:
    if workspace.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {workspace.jobs}")
    name = study.name
    if not name.isprintable() or name[:1] in ("", ".") or set(name) & set("/\\") or len(name.encode()) > 150:
        raise UserError(f"--name {name!r} is not a valid file name. Use letters, digits, spaces and dashes.")


def _choose(study: Study, tuning: list[Run], tuned: Outcome) -> dict[str, dict[str, Any]]:
    """Return for each row the overrides with the best validation kNN; the first of equals."""
    chosen: dict[str, dict[str, Any]] = {}
    best: dict[str, float] = {}
    for number, run in enumerate(tuning):
        record = tuned.records.get(run.key)
        if record is not None and record["numbers"]["knn"] > best.get(run.label, -1.0):
            best[run.label] = record["numbers"]["knn"]
            chosen[run.label] = study.grid[number % len(study.grid)]
    return chosen


def describe(study: Study, runs: Sequence[Run], chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the study as it is written: the records of each row by seed, and the text of the table."""
    rows = [
        {
            "label": entry.label, "settings": entry.settings, "tuned": dict(chosen.get(entry.label, {})),
            "records": {str(run.seed): run.record for run in runs if run.label == entry.label},
        }
        for entry in study.entries
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "name": study.name, "title": study.title, "kind": study.evaluation.kind,
        "command": study.command, "rule": study.rule, "seeds": study.seeds, "rows": rows,
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
        f" seeds {', '.join(map(str, study.seeds))}"
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
    from snclr.benchmark.tables import build_table, markdown
    from snclr.reports.figures.comparison import draw_comparison, draw_purity

    table = build_table(study, records)
    stem = out / study["name"]
    files = {"markdown": f"{stem}.md", "json": f"{stem}.json"}
    write_atomic(files["markdown"], markdown(table))
    write_atomic(files["json"], json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    if any(row["seeds"] for row in table["rows"]):
        files["figure"] = f"{stem}.png"
        draw_comparison(table, files["figure"])
    if draw_purity(study, records.by_row(study), f"{stem}-purity.png"):
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
            arguments += [flag, data_name(str(value)) if is_path else str(value)]
    return shlex.join([*arguments, "--out", "OUT"])
