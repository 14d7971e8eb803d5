"""Rebuild the tables and figures of docs/results.md from the records that are kept in results/.

    python scripts/build_results.py            # what `make results` runs
    python scripts/build_results.py --check    # changes nothing; exit code 1 where the page is not up to date

The page has marks, and what stands between a mark and its end is replaced:

    <!-- table: NAME -->      the table of results/studies/NAME.json, with its protocol and command
    <!-- figure: NAME -->     its figure, drawn to docs/figures/NAME.png
    <!-- purity: NAME -->     the purity of its neighbours over training, docs/figures/NAME-purity.png
    <!-- cost -->             hours and runs of each study, and in all
    <!-- end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snclr.comparison.store import Records
from snclr.comparison.tables import build_table, markdown
from snclr.errors import UserError
from snclr.report.comparison_figure import draw_comparison, draw_purity

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"(<!-- (table|figure|purity|cost)(?:: ([\w.-]+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild, or check; the exit code is 1 where a check finds a difference, 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of records")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", help="the page with the marks")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    a = parser.parse_args(argv)
    try:
        old = a.page.read_text(encoding="utf-8")
        new = rebuild(old, Records(a.results), a.page.parent / "figures", draw=not a.check)
    except (UserError, FileNotFoundError) as error:
        print(f"build_results: {error}", file=sys.stderr)
        return 2
    if a.check:
        print("up to date" if new == old else f"{a.page} is not what its records say: run make results")
        return int(new != old)
    a.page.write_text(new, encoding="utf-8")
    print(f"{a.page}: {len(MARK.findall(new))} parts rebuilt from {a.results}")
    return 0


def rebuild(page: str, records: Records, figures: Path, *, draw: bool = True) -> str:
    """The page with every marked part made anew; figures are drawn on the way."""

    def part(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        return f"{start}\n{_part(kind, name, records, figures, draw).strip()}\n\n{end}"

    return MARK.sub(part, page)


def _part(kind: str, name: str | None, records: Records, figures: Path, draw: bool) -> str:
    if kind == "cost":
        return _cost(records)
    if name is None:
        raise UserError(f"the mark {kind!r} needs the name of a study: <!-- {kind}: NAME -->")
    study = records.read_study(name)
    table = build_table(study, records)
    if kind == "table":
        return markdown(table)
    figures.mkdir(parents=True, exist_ok=True)
    file = figures / (f"{name}.png" if kind == "figure" else f"{name}-purity.png")
    if draw and kind == "figure":
        draw_comparison(table, file)
    elif draw:
        draw_purity(study, records.of_rows(study), file)
    words = study["title"] if kind == "figure" else f"{study['title']}: right neighbours over training"
    return f"![{words}](figures/{file.name})"


def _cost(records: Records) -> str:
    """Hours of every study; a run that several share counts in each, and once in all."""
    lines = ["| study | runs | hours |", "|---|--:|--:|"]
    seen: dict[str, float] = {}
    for path in sorted(records.studies.glob("*.json")):
        study: dict[str, Any] = records.read_study(path.stem)
        own = {r["key"]: r["cost"]["seconds"] / 3600 for row in records.of_rows(study) for r in row.values()}
        seen |= own
        lines.append(f"| {study['name']} | {len(own)} | {sum(own.values()):.2f} |")
    return "\n".join([*lines, f"| all, each run once | {len(seen)} | {sum(seen.values()):.2f} |"])


if __name__ == "__main__":
    sys.exit(main())
