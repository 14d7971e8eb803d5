"""Print the results of `snclr compare` and `snclr ablate`."""

import shutil
import sys
import textwrap
from typing import Any

from snclr.api.compare import ablate, compare
from snclr.cli.flags import Command
from snclr.cli.output import print_table, split_columns
from snclr.runtime.progress import print_wrapped
from snclr.studies.paper import RULES, TABLES
from snclr.studies.run_study import StudyEstimate, StudyResult

_COMPARE_EXAMPLES = """Examples:
  snclr compare --data photos/ --out runs/compare --dry-run
  snclr compare --data photos/ --out runs/k --methods snclr,snclr:neighbors=30
  snclr compare --data cifar10 --out runs/tuned --tune lr=0.03,0.06 --seeds 0,1
  snclr compare --data demo --out runs/demo --recipe demo --budget images
  snclr compare --data imagenet/ --out runs/table-1 --study table-1-resnet50

Each row of the table is a method, or a method with its own settings (METHOD:NAME=VALUE,NAME=VALUE). Flags of `snclr
pretrain` apply to all rows; a row cannot set encoder, data, batch size or views for itself, except in a named study
(`snclr studies`). Each run is a subprocess. Finished runs are identified by their settings and data: the same command
continues after a stop, and an additional row or seed trains only that row or seed.
"""
_ABLATE_EXAMPLES = """Examples:
  snclr ablate --table positiveness --data photos/ --out runs/ablate
  snclr ablate --table neighbors --values 5,10 --data photos/ --out runs/ablate
  snclr ablate --table cost --recipe cifar-cpu --data cifar10 --out runs/ablate

{tables}

Tables with the same --out share runs: a row with the default settings is trained once.
"""


def show_study(result: StudyResult | StudyEstimate) -> None:
    """Print the table and the failed runs, or the estimate of a dry run."""
    from snclr.studies.tables import explanation, parts

    if isinstance(result, StudyEstimate):
        _show_estimate(result)
        return
    print(result.table["title"])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for heads, rows in parts(result.table):
        for columns in split_columns([heads, *rows], width):
            print()
            print_table(columns[0], columns[1:])
    print()
    print_wrapped("\n".join(explanation(result.table)), indent="  ")
    print("files: " + "  ".join(result.files.values()))
    for title, reason in result.failed.items():
        print_wrapped(f"failed: {title}: {reason}", sys.stderr)
    if result.failed:
        print("The same command repeats only the failed runs.", file=sys.stderr)


def _show_estimate(estimate: StudyEstimate) -> None:
    from snclr.runtime.progress import duration

    print(estimate.title + (f"\nrule: {estimate.rule}" if estimate.rule else ""))
    for run in estimate.runs:
        print(f"  {'finished' if run['finished'] else 'to train'}  {run['run']}")
    time = "unknown" if estimate.seconds is None else f"about {duration(estimate.seconds)}"
    tuning = f", {estimate.tuning} of them to tune" if estimate.tuning else ""
    print_wrapped(
        f"runs: {len(estimate.runs)}{tuning}; {estimate.pending} to train: {time} ({estimate.how}), plus a short"
        " evaluation of each. Nothing was written."
    )


_WRAP = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="  ")
_TABLES = "\n\n".join(f"{name}\n  {text}\n{_WRAP.fill(f'rule: {RULES[name]}')}" for name, text in TABLES.items())
_SHARED: dict[str, Any] = {
    "needs": ("data",), "types": {"seeds": str, "tune": list[str]},
    "hidden": ("method", "seed", "resume", "overwrite", "keep_checkpoints"),
}  # fmt: skip
COMMANDS = {
    "compare": Command(compare, show_study, _COMPARE_EXAMPLES, **_SHARED),
    "ablate": Command(ablate, show_study, _ABLATE_EXAMPLES.format(tables=_TABLES), **_SHARED),
}
