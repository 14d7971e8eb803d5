"""`make soak`: test every promise of docs/reliability.md at its full number of trials, and print one table.

    python scripts/soak.py                                   all of it
    python scripts/soak.py --only 2 --only 8                 some rows
    python scripts/soak.py --share 0.1                       a tenth of the trials
    python scripts/soak.py --json soak.json --write docs/reliability.md
    python scripts/soak.py --only evaluation_kill --keep soak.json --write docs/reliability.md     after a fix

Rows are independent. A failed trial is printed with its seed; `--only ROW --seed N` repeats it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"


@dataclass
class Row:
    """The trials of one promise."""

    row: str
    promise: str
    trials: int
    failures: int
    skipped: str
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return 1 if one failed, else 0."""
    # A shell script ignores SIGINT in its background jobs, and so would every process that the trials start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _options(argv)
    rows = _in_parts(options) if options.jobs > 1 and options.seed is None else _run(options)
    if options.keep:
        rows = merged(rows, [Row(**row) for row in json.loads(Path(options.keep).read_text())])
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.part is None:
        table = as_markdown(rows)
        print(table)
        if options.write:
            write_between_marks(Path(options.write), table)
    return 1 if any(row.failures for row in rows) else 0


def merged(new: list[Row], old: list[Row]) -> list[Row]:
    """Return the earlier rows, with those that were repeated replaced and new ones added.

    >>> before, after = Row("2", "b", 6, 1, "", 9.0), Row("2", "b", 20, 0, "", 30.0)
    >>> [row.trials for row in merged([after], [Row("1", "a", 10, 0, "", 5.0), before])]
    [10, 20]
    """
    again = {row.promise: row for row in new}
    kept = [again.pop(row.promise, row) for row in old]
    return sorted([*kept, *again.values()], key=lambda row: int(row.row))


def _run(options: argparse.Namespace) -> list[Row]:
    """Run the trials of this process, those with several ranks last."""
    sys.path.insert(0, str(ROOT))
    promises = importlib.import_module("tests.reliability.promises").PROMISES
    harness = importlib.import_module("tests.reliability.harness")
    chosen = [
        promise for promise in promises if not options.only or {promise.row, promise.trial.__name__} & set(options.only)
    ]
    part, parts = (0, 1) if options.part is None else map(int, options.part.split("/"))
    folder = Path(tempfile.mkdtemp(prefix="snclr-soak-"))
    sandbox = harness.Sandbox(folder / "work", check_time_limits=True)
    rows: dict[str, Row] = {}
    try:
        for promise in sorted(chosen, key=lambda promise: promise.multi_rank):
            seeds = list(range(math.ceil(promise.full * options.share))) if options.seed is None else [options.seed]
            # Trials with several ranks run alone, in the first part, when the other parts are almost done.
            mine = (seeds if part == 0 else []) if promise.multi_rank else seeds[part::parts]
            rows[promise.name] = _try(promise, sandbox, mine)
    finally:
        sandbox.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [rows[promise.name] for promise in chosen]


def _in_parts(options: argparse.Namespace) -> list[Row]:
    """Run the trials in several processes, each with its share of the seeds, and add up the rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(options.jobs)]
        shared = [f"--share={options.share}", "--jobs=1", *(f"--only={row}" for row in options.only or [])]
        running = [
            subprocess.Popen([sys.executable, __file__, *shared, f"--part={n}/{options.jobs}", f"--json={file}"])
            for n, file in enumerate(files)
        ]
        for process in running:
            process.wait()
        parts = [[Row(**row) for row in json.loads(file.read_text())] for file in files]
    return [
        Row(
            same[0].row, same[0].promise, sum(r.trials for r in same), sum(r.failures for r in same),
            next((r.skipped for r in same if r.skipped), ""), max(r.seconds for r in same),
        )
        for same in zip(*parts, strict=True)
    ]  # fmt: skip


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="a row of the table, or the name of a trial; may be repeated"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, metavar="X", help="run this share of the trials (default: 1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="run only this trial")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="trials to run in parallel (default: 2)")
    parser.add_argument("--part", metavar="I/N", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--keep", metavar="FILE", help="take all other rows from the --json FILE of an earlier call")
    parser.add_argument("--write", metavar="FILE", help=f"write the table between {BEGIN} and {END} of a file")
    return parser.parse_args(argv)


def _try(promise: Any, sandbox: Any, seeds: list[int]) -> Row:
    """Run all trials of one promise; a failure is printed and counted, and the next trial runs."""
    from _pytest.outcomes import Skipped

    row = Row(promise.row, promise.text, 0, 0, "", 0.0)
    start = time.monotonic()
    for number in seeds:
        try:
            promise.trial(sandbox, number)
        except Skipped as skip:
            row.skipped = str(skip)
            break
        except Exception:
            row.failures += 1
            print(f"FAILED: {promise.name}, seed {number}\n{traceback.format_exc()}", file=sys.stderr)
        row.trials += promise.checks
    row.seconds = round(time.monotonic() - start, 1)
    print(f"{promise.name}: {row.trials} trials, {row.failures} failures, {row.seconds:.0f} s", file=sys.stderr)
    return row


def as_markdown(rows: list[Row]) -> str:
    """Return the table, and the machine it was measured on.

    >>> print(as_markdown([Row("8", "damage is found", 200, 0, "", 3.25)]).splitlines()[2])
    | 8 | damage is found | 200 | 0 | 3 s |
    """
    lines = ["| row | promise | trials | failures | time |", "|---|---|---|---|---|"]
    for row in rows:
        trials = f"skipped: {row.skipped}" if row.skipped else f"{row.trials:,}"
        lines.append(f"| {row.row} | {row.promise} | {trials} | {row.failures} | {row.seconds:.0f} s |")
    lines += ["", f"{_machine()}."]
    return "\n".join(lines)


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


def write_between_marks(path: Path, table: str) -> None:
    """Replace the text between the two marks of a file."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        sys.exit(f"{path} has no lines {BEGIN} and {END} for the table")
    head, _, rest = text.partition(BEGIN)
    path.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main())
