"""Print the results of `snclr compare` and `snclr ablate`."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

from snclr.api.compare import ablate, compare
from snclr.cli.flags import Command
from snclr.cli.output import print_table
from snclr.studies.estimate import StudyEstimate
from snclr.studies.paper.ablations import RULES, TABLES
from snclr.studies.run_study import StudyResult

_COMPARE_EXAMPLES = """Examples:
  snclr compare --methods snclr,nnclr,mocov3 --seeds 3 --recipe demo --data demo --out runs/compare
  snclr compare --methods snclr,snclr:neighbors=30,gamma=max,nnclr --seeds 0,1 --data photos/ --out runs/compare
  snclr compare --methods snclr,byol --tune lr=0.002,0.004,0.008 --data cifar10 --recipe cifar-cpu --out runs/tuned
  snclr compare --methods snclr,dino:local_crops=4 --budget images --recipe demo --data demo --out runs/images
  snclr compare --study table-1-resnet50 --data imagenet/ --epochs 100 --out runs/table-1
  snclr compare --study table-2-resnet50 --data demo --recipe demo --epochs 4 --out runs/table-2

Each row of the table is a method, or a method with its own settings (METHOD:NAME=VALUE,NAME=VALUE). Flags of `snclr
pretrain` apply to all rows; a row cannot set encoder, data, batch size or views for itself, except in a named study
(`snclr studies`). Each run is a subprocess. Finished runs are identified by their settings and data: the same command
continues after a stop, and an additional row or seed trains only that row or seed.
"""
_ABLATE_EXAMPLES = """Examples:
  snclr ablate --table positiveness --seeds 3 --recipe demo --data demo --out runs/ablate
  snclr ablate --table neighbors --values 5,10,20 --recipe demo --data demo --out runs/ablate
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
    if result.table:
        print(result.table["title"])
        for heads, rows in parts(result.table):
            print()
            print_table(heads, rows, wrap=False)
        print("\n" + "\n".join(f"  {line}" for line in explanation(result.table)))
        print("files: " + "  ".join(result.files.values()))
    for title, reason in result.failed.items():
        print(f"failed: {title}: {reason}", file=sys.stderr)
    if result.failed:
        print("The same command repeats only the failed runs.", file=sys.stderr)


def _show_estimate(estimate: StudyEstimate) -> None:
    print(estimate.title + (f"\nrule: {estimate.rule}" if estimate.rule else ""))
    for run in estimate.runs:
        print(f"  {'finished' if run['finished'] else 'to train'}  {run['run']}")
    duration = "unknown" if estimate.seconds is None else f"about {estimate.seconds / 3600:.2f} hours"
    tuning = f", {estimate.tuning} of them to tune" if estimate.tuning else ""
    print(
        f"runs: {len(estimate.runs)}{tuning}; {estimate.pending} to train: {duration} ({estimate.how}), plus a short"
        " evaluation of each. Nothing was written."
    )


_WRAP = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="  ")
_TABLES = "\n\n".join(f"{name}\n  {text}\n{_WRAP.fill(f'rule: {RULES[name]}')}" for name, text in TABLES.items())
_SHARED: dict[str, Any] = {
    "show": show_study, "needs": ("data",), "types": {"seeds": str, "tune": list[str]},
    "hidden": ("method", "seed", "resume", "overwrite", "keep_checkpoints"),
}  # fmt: skip
COMMANDS = {
    "compare": Command(function=compare, examples=_COMPARE_EXAMPLES, **_SHARED),
    "ablate": Command(function=ablate, examples=_ABLATE_EXAMPLES.format(tables=_TABLES), **_SHARED),
}
