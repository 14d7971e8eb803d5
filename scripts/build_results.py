"""Rebuild the tables and figures of docs/results/tables.md from the records in results/.

    python scripts/build_results.py            # `make results`
    python scripts/build_results.py --check    # changes nothing; exit code 1 if the page is out of date

The content between a marker and its end is replaced:

    <!-- table: NAME -->      the table of results/studies/NAME.json, with its protocol and command
    <!-- figure: NAME -->     its figure, drawn to docs/results/figures/NAME.png
    <!-- purity: NAME -->     neighbor purity over training, docs/results/figures/NAME-purity.png
    <!-- cost -->             hours and runs of each study, and the total
    <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snclr.errors import UserError
from snclr.reports.figures.comparison import draw_comparison, draw_neighbor_purity
from snclr.studies.records import Records
from snclr.studies.tables import build_table, markdown

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "tables.md"
MARKER = re.compile(r"(<!-- (table|figure|purity|cost)(?:: ([\w.-]+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild or check the page; return 1 if a check finds a difference, 2 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of records")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the markers")
    parser.add_argument("--check", action="store_true", help="only check whether the page is up to date")
    a = parser.parse_args(argv)
    try:
        old = a.page.read_text(encoding="utf-8")
        new = rebuild(old, Records(a.results), a.page.parent / "figures", draw=not a.check)
    except (UserError, FileNotFoundError) as error:
        print(f"build_results: {error}", file=sys.stderr)
        return 2
    if a.check:
        print("up to date" if new == old else f"{a.page} is out of date: run make results")
        return int(new != old)
    a.page.write_text(new, encoding="utf-8")
    print(f"{a.page}: {len(MARKER.findall(new))} sections rebuilt from {a.results}")
    return 0


def rebuild(page: str, records: Records, figures: Path, *, draw: bool = True) -> str:
    """Return the page with every marked section replaced; draw the figures."""

    def replace(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        return f"{start}\n{_section(kind, name, records, figures, draw).strip()}\n\n{end}"

    return MARKER.sub(replace, page)


def _section(kind: str, name: str | None, records: Records, figures: Path, draw: bool) -> str:
    if kind == "cost":
        return _cost(records)
    if name is None:
        raise UserError(f"the marker {kind!r} needs the name of a study: <!-- {kind}: NAME -->")
    study = json.loads(_current_wording(_study_text(records, name)))
    table = build_table(study, records)
    if kind == "table":
        return _current_wording(markdown(table))
    figures.mkdir(parents=True, exist_ok=True)
    file = figures / (f"{name}.png" if kind == "figure" else f"{name}-purity.png")
    if draw and kind == "figure":
        draw_comparison(table, file)
    elif draw:
        draw_neighbor_purity(study, records.by_row(study), file)
    alt = study["title"] if kind == "figure" else f"{study['title']}: neighbor purity over training"
    return f"![{alt}](figures/{file.name})"


def _study_text(records: Records, name: str) -> str:
    """Return the JSON text of a study."""
    path = records.studies / f"{name}.json"
    if not path.is_file():
        studies = ", ".join(sorted(path.stem for path in records.studies.glob("*.json"))) or "none"
        raise UserError(f"there is no study {name!r} in {records.folder}; studies: {studies}")
    return path.read_text(encoding="utf-8")


def _current_wording(text: str) -> str:
    """Convert the spelling and wording of older records."""
    for old, new in {
        "eighbour": "eighbor", "centre": "center", "tandardise": "tandardize", "seconds a step": "seconds per step",
        "against the length of the queue": "over the queue length",
        "in every row the neighbors are searched, also where the loss uses none: to show their purity":
            "every row searches neighbors, even if its loss uses none, to measure neighbor purity",
    }.items():  # fmt: skip
        text = text.replace(old, new)
    return text


def _cost(records: Records) -> str:
    """Return the hours of each study; a run that several studies share counts in each, and once in the total."""
    lines = ["| study | runs | hours |", "|---|--:|--:|"]
    seen: dict[str, float] = {}
    for path in sorted(records.studies.glob("*.json")):
        study: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        own = {r["key"]: r["cost"]["seconds"] / 3600 for row in records.by_row(study) for r in row.values()}
        seen |= own
        lines.append(f"| {study['name']} | {len(own)} | {sum(own.values()):.2f} |")
    return "\n".join([*lines, f"| total, each run once | {len(seen)} | {sum(seen.values()):.2f} |"])


if __name__ == "__main__":
    sys.exit(main())
