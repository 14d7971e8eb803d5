"""`snclr compare`: methods × seeds under one budget. What `snclr ablate` shares with it is here too."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands import pretrain as pretrain_command
from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.comparison.study import Study

EXAMPLES = """examples:
  snclr compare --methods snclr,nnclr,mocov3 --seeds 3 --recipe demo --data demo --out runs/compare
  snclr compare --methods snclr,snclr:neighbors=30,gamma=max,nnclr --seeds 0,1 --data photos/ --out runs/compare
  snclr compare --methods snclr,byol --tune lr=0.002,0.004,0.008 --data cifar10 --recipe cifar-cpu --out runs/tuned

A row is a method, or a method with settings of its own (METHOD:NAME=VALUE,NAME=VALUE). Any setting of `snclr pretrain`
may be given and holds for all rows; encoder, data, views and steps cannot differ between rows. Each run has a process
of its own. Finished runs are recognised by their settings and data: the same command goes on where it was stopped, and
a command with another row or seed makes that alone.
"""
HIDDEN = ("method", "seed", "resume", "overwrite", "keep_checkpoints")


def compare(
    *,
    methods: str | Sequence[str] = "snclr,nnclr,mocov3",
    seeds: int | str | Sequence[int] = 3,
    out: str | Path,
    results: str | Path | None = None,
    name: str = "compare",
    eval_data: str | None = None,
    test: str | None = None,
    k: int = 200,
    tune: Sequence[str] = (),
    jobs: int = 1,
    keep_runs: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare methods over seeds; the table as plain data, with `exit_code`, `failed` and the `files` written.

    `settings` are those of `snclr.pretrain`, equal for all rows. Safe to call again: finished runs are kept.
    """
    from snclr.comparison.plan import Evaluation, parse_methods, parse_seeds, parse_tune
    from snclr.comparison.study import Study, look_at_data, look_at_test

    entries, grid = parse_methods(methods), parse_tune(tune)
    check_settings(settings, [str(entry.settings["method"]) for entry in entries])
    _check_tuning(entries, grid)
    data = look_at_data(str(settings.get("data") or ""))
    how, remark = look_at_test(Evaluation(data=eval_data, test=test, k=k), data, settings["data"], entries)
    command = command_line(
        "compare", {"methods": ",".join(e.label for e in entries), "seeds": seeds, "eval_data": eval_data, "test": test,
                    "k": None if k == 200 else k, "tune": list(tune), "name": None if name == "compare" else name,
                    **settings},
    )  # fmt: skip
    study = Study(
        name=name, title=_title(data.name, entries, parse_seeds(seeds)), entries=entries,
        seeds=parse_seeds(seeds), common=settings, evaluation=how, data=data, command=command, grid=grid,
        notes=[remark] if remark else [],
    )  # fmt: skip
    return carry_out(study, out, results, jobs=jobs, keep_runs=keep_runs, dry_run=dry_run, quiet=quiet)


def _title(data: str, entries: Sequence[Any], seeds: Sequence[int]) -> str:
    rows, times = len(entries), len(seeds)
    return f"{data}: {rows} row{'s' if rows != 1 else ''}, {times} seed{'s' if times != 1 else ''}"


def check_settings(settings: dict[str, Any], methods: Sequence[str] = ("snclr",)) -> None:
    """Refuse what the comparison itself decides, what no method uses, and what `resolve` would."""
    from snclr.config import resolve, settings_of
    from snclr.methods import METHODS

    for name in HIDDEN[:4]:
        if name in settings:
            instead = {"method": "--methods", "seed": "--seeds"}.get(
                name, "the same command again: it goes on by itself"
            )
            raise UserError(f"--{name} is not for a comparison; use {instead}")
    known = [method for method in methods if method in METHODS]
    used = {name for method in known for name in settings_of(method, settings)}
    if known and (unused := [name for name in settings if name not in used]):
        raise UserError(f"none of the methods ({', '.join(known)}) uses {unused[0]}; leave the flag out")
    for method in methods:
        resolve({**(settings_of(method, settings) if method in known else {}), "method": method})


def _check_tuning(entries: Sequence[Any], grid: Sequence[dict[str, Any]]) -> None:
    from snclr.methods import METHODS

    for entry in entries:
        method = entry.settings["method"]
        if grid and method in METHODS and METHODS[method].needs_labels:
            raise UserError(
                f"--tune with the method {method}: it trains on the very labels it would be chosen by. Leave it out"
                " here, and compare it in a command of its own."
            )
        if grid and (both := set(grid[0]) & set(entry.settings)):
            raise UserError(f"{entry.label!r} sets {sorted(both)[0]}, and --tune does too: leave one of them out")


def carry_out(
    study: Study, out: str | Path, results: str | Path | None, *, jobs: int, keep_runs: bool, dry_run: bool, quiet: bool
) -> dict[str, Any]:
    """Make a study's runs, then its table, files and figures; or, dry, only say what would be made."""
    from snclr.comparison.plan import check_name
    from snclr.comparison.runner import Place
    from snclr.comparison.store import Records
    from snclr.comparison.study import conduct, estimate
    from snclr.durable import FileLock, check_writable, lock_folder

    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    check_name(study.name)
    place = Place(
        out=Path(out), records=Records(results or Path(out) / "results"), jobs=jobs, keep_runs=keep_runs, quiet=quiet
    )
    if dry_run:
        return {"exit_code": 0, "dry_run": True, "title": study.title, "rule": study.rule, **estimate(study, place)}
    check_writable(place.records.folder / "record", f"choose another {'--results' if results else '--out'} folder")
    lock = FileLock(place.out / ".snclr-compare.lock")
    lock_folder(lock, "another comparison", "choose another --out folder")
    try:
        said, outcome = conduct(study, place)
        files, table = write_files(said, place.records, place.out) if said else ({}, {})
    finally:
        lock.release()
    return {**table, "exit_code": outcome.exit_code, "failed": outcome.failed, "files": files}


def write_files(study: dict[str, Any], records: Any, out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The table as JSON and markdown, and the figures, all under the study's name; their paths, and the table."""
    from snclr.comparison.tables import build_table, markdown
    from snclr.durable import write_atomic
    from snclr.report.comparison_figure import draw_comparison, draw_purity

    table = build_table(study, records)
    stem = out / study["name"]
    files = {"markdown": f"{stem}.md", "json": f"{stem}.json"}
    write_atomic(files["markdown"], markdown(table))
    write_atomic(files["json"], json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    if any(row["seeds"] for row in table["rows"]):
        files["figure"] = f"{stem}.png"
        draw_comparison(table, files["figure"])
    if draw_purity(study, records.of_rows(study), f"{stem}-purity.png"):
        files["purity"] = f"{stem}-purity.png"
    return files, table


def command_line(command: str, given: dict[str, Any]) -> str:
    """The command that makes a study, with the data's name for its place: it is kept beside the results.

    >>> command_line("compare", {"methods": "snclr,byol", "seeds": 3, "data": "/somewhere/photos", "sincos": False})
    'snclr compare --methods snclr,byol --seeds 3 --data photos --no-sincos --out OUT'
    """
    from snclr.comparison.plan import data_name

    words = ["snclr", command]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            words += [word for item in value for word in (flag, item)]
        elif isinstance(value, (list, tuple)):
            words += [flag, ",".join(map(str, value)) + "," * (len(value) == 1)] if value else []
        elif value is not None:
            place = name in ("data", "eval_data", "test", "init_from")
            words += [flag, data_name(str(value)) if place else str(value)]
    return shlex.join([*words, "--out", "OUT"])


# ---- flags


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command, then those of pretrain."""
    group = parser.add_argument_group("the comparison")
    group.add_argument(
        "--methods", default="snclr,nnclr,mocov3", metavar="LIST",
        help="the rows: METHOD or METHOD:NAME=VALUE,… ; `snclr methods` lists the methods",
    )  # fmt: skip
    group.add_argument(
        "--tune", action="append", default=[], metavar="NAME=A,B,…",
        help="try these values for every row, choose by kNN on a tenth of the training set with a seed of its own;"
        " may be given several times",
    )  # fmt: skip
    add_shared_arguments(parser, group, "compare")
    parser.epilog = EXAMPLES
    parser.usage = "snclr compare --methods LIST --data DATA --out DIR [--seeds 3] [--recipe NAME] [options]"
    parser.set_defaults(handler=_run)


def add_shared_arguments(parser: argparse.ArgumentParser, group: Any, default_name: str) -> None:
    """What compare and ablate have in common, and every flag of pretrain that is not the comparison's own."""
    add = group.add_argument
    add("--seeds", default="3", metavar="N|LIST", help="a number of seeds, or a list such as 0,4,7")
    add("--results", metavar="DIR", help="where the small record of each run goes (default: OUT/results)")
    add("--name", default=default_name, metavar="TEXT", help="name of the table and its files")
    add("--eval-data", metavar="DATA", help="labelled images to measure on (default: --data)")
    add("--test", metavar="DATA", help="the test images, where they are apart (default: the set's own, or a fifth)")
    add("--k", type=int, default=200, metavar="N", help="neighbours that vote in the kNN evaluation")
    add("--jobs", type=int, default=1, metavar="N", help="runs side by side; their seconds are then no measure")
    add("--keep-runs", action="store_true", help="keep checkpoints (else a finished run keeps encoder and metrics)")
    add("--dry-run", action="store_true", help="only list the runs and what they would cost")
    pretrain_command.add_arguments(parser, "pretrain")
    for action in parser._actions:
        if action.dest in HIDDEN:
            action.help = argparse.SUPPRESS
        elif action.dest == "out":
            action.help = "folder for the runs, the table and the figures"
        elif action.dest == "json":
            action.help = "print the table as one JSON object"


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of pretrain that were given, without --out."""
    return {name: value for name, value in pretrain_command.given_settings(arguments).items() if name != "out"}


def out_of(arguments: argparse.Namespace) -> str:
    """--out, which is needed."""
    if not getattr(arguments, "out", ""):
        raise UserError("out is missing: give --out, the folder for the runs and the table")
    return str(arguments.out)


def _run(a: argparse.Namespace) -> int:
    found = compare(
        methods=a.methods, seeds=a.seeds, out=out_of(a), results=a.results, name=a.name, eval_data=a.eval_data,
        test=a.test, k=a.k, tune=a.tune, jobs=a.jobs, keep_runs=a.keep_runs, dry_run=a.dry_run, quiet=a.json,
        **given_settings(a),
    )  # fmt: skip
    return show(found, as_json=a.json)


def show(found: dict[str, Any], *, as_json: bool) -> int:
    """Print a study's table, or what a dry run would make; the exit code."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    elif found.get("dry_run"):
        print(_dry(found))
    elif "rows" in found:
        from snclr.comparison.tables import text

        print("\n" + text(found) + "\n")
        print("files: " + "  ".join(found["files"].values()))
    for title, reason in found.get("failed", {}).items():
        print(f"failed: {title}: {reason}", file=sys.stderr)
    if found.get("failed"):
        print("The same command tries the failed runs again and repeats no other.", file=sys.stderr)
    return int(found["exit_code"])


def _dry(found: dict[str, Any]) -> str:
    lines = [found["title"], *([f"rule: {found['rule']}"] if found["rule"] else [])]
    lines += [f"  {'finished' if run['finished'] else 'to make ':8}  {run['run']}" for run in found["runs"]]
    hours = "unknown" if found["seconds"] is None else f"about {found['seconds'] / 3600:.2f} hours"
    tuning = f", {found['tuning']} of them to tune" if found["tuning"] else ""
    lines.append(f"{len(found['runs'])} runs{tuning}; {found['pending']} to make: {hours} ({found['how']}), and the")
    lines.append("evaluation of each, which is short. Nothing was written.")
    return "\n".join(lines)
