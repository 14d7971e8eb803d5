"""`snclr ablate`: the paper's five ablation tables, scaled to the data at hand; the machinery is that of compare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snclr.commands.compare import (
    add_shared_arguments,
    carry_out,
    check_settings,
    command_line,
    given_settings,
    out_of,
    show,
)
from snclr.errors import UserError

EXAMPLES = """examples:
  snclr ablate --table positiveness --seeds 3 --recipe demo --data demo --out runs/ablate
  snclr ablate --table neighbors --values 5,10,20 --recipe demo --data demo --out runs/ablate
  snclr ablate --table cost --recipe cifar-cpu --data cifar10 --out runs/ablate

{tables}

With one --out the tables share their runs: the row of the default settings is made once.
"""


def ablate(
    *,
    table: str,
    values: str | Sequence[int] | None = None,
    seeds: int | str | Sequence[int] = 3,
    out: str | Path,
    results: str | Path | None = None,
    name: str | None = None,
    eval_data: str | None = None,
    test: str | None = None,
    k: int = 200,
    steps: int = 30,
    jobs: int = 1,
    keep_runs: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Make one of the paper's ablation tables; returns what `snclr.compare` returns.

    `values` are the K or Q of the rows instead of those by the rule; `steps` are those of the table cost.
    """
    from snclr.comparison.ablations import TABLES, ablation
    from snclr.comparison.plan import Evaluation, parse_seeds
    from snclr.comparison.study import Study, look_at_data, look_at_test
    from snclr.config import resolve

    check_settings(settings)
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    data = look_at_data(str(settings.get("data") or ""))
    entries, rule = ablation(table, resolve(settings), data, _numbers(values))
    how, notes = Evaluation(kind="cost", steps=steps), [""]
    if table != "cost":
        how, remark = look_at_test(Evaluation(data=eval_data, test=test, k=k), data, settings["data"], entries)
        notes = [
            remark,
            "in every row the neighbours are searched, also where the loss uses none: to show their purity",
        ]
    name = name or f"ablate-{table}"
    given = {
        "table": table, "values": _numbers(values), "seeds": seeds, "eval_data": eval_data, "test": test,
        "k": None if k == 200 else k, "steps": steps if table == "cost" and steps != 30 else None,
        "name": None if name == f"ablate-{table}" else name, **settings,
    }  # fmt: skip
    study = Study(
        name=name, title=f"{data.name}: {TABLES[table]}", entries=entries, seeds=parse_seeds(seeds), common=settings,
        evaluation=how, data=data, command=command_line("ablate", given), rule=rule, notes=list(filter(None, notes)),
    )  # fmt: skip
    return carry_out(study, out, results, jobs=jobs, keep_runs=keep_runs, dry_run=dry_run, quiet=quiet)


def _numbers(values: str | Sequence[int] | None) -> list[int] | None:
    if values is None:
        return None
    try:
        return [int(part) for part in (values.split(",") if isinstance(values, str) else values) if str(part).strip()]
    except ValueError:
        raise UserError(f"--values takes whole numbers, e.g. 10,30,50, not {values!r}") from None


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command, then those of pretrain."""
    from snclr.comparison.ablations import RULES, TABLES

    group = parser.add_argument_group("the ablation")
    group.add_argument("--table", required=True, choices=list(TABLES), help="which of the paper's tables; see below")
    group.add_argument("--values", metavar="LIST", help="K or Q of the rows (neighbors, queue, cost), not by the rule")
    group.add_argument("--steps", type=int, default=30, metavar="N", help="steps that the table cost measures")
    add_shared_arguments(parser, group, "")
    parser.set_defaults(name=None)
    tables = "\n\n".join(f"{table}\n  {text}\n  rule: {_wrapped(RULES[table])}" for table, text in TABLES.items())
    parser.epilog = EXAMPLES.format(tables=tables)
    parser.usage = "snclr ablate --table TABLE --data DATA --out DIR [--seeds 3] [--recipe NAME] [options]"
    parser.set_defaults(handler=_run)


def _wrapped(rule: str) -> str:
    import textwrap

    return textwrap.fill(rule, 112, subsequent_indent="  ")


def _run(a: argparse.Namespace) -> int:
    found = ablate(
        table=a.table, values=a.values, steps=a.steps, seeds=a.seeds, out=out_of(a), results=a.results, name=a.name,
        eval_data=a.eval_data, test=a.test, k=a.k, jobs=a.jobs, keep_runs=a.keep_runs, dry_run=a.dry_run, quiet=a.json,
        **given_settings(a),
    )  # fmt: skip
    return show(found, as_json=a.json)
