"""Print the results of `snclr report`, `explore` and `curate`."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from cyclopts import Parameter

from snclr.api.report import curate, explore, report
from snclr.cli.flags import Command
from snclr.cli.output import size
from snclr.explorer.jobs import THREADS
from snclr.runtime.progress import print_wrapped

if TYPE_CHECKING:
    from snclr.evaluation.results import CurateResult
    from snclr.explorer.results import ExploreResult
    from snclr.reports.build import ReportResult

_EXAMPLES = """Examples:
  snclr report runs/photos                  # writes runs/photos/report.html
  snclr report runs/photos --out photos.html --rows 12 --images 500
  snclr report runs/photos runs/other       # runs/photos/report-runs.html
  snclr report runs/photos --class-names names.txt
  snclr report runs/photos --no-embeddings  # encodes no images

One HTML file: training curves, images with their neighbors, a map of the images, evaluations with their protocols, bad
images and settings. It loads nothing from the network, so it can be sent by email. Runs in progress have a report too.
"""
_EXPLORE_EXAMPLES = """Examples:
  snclr explore runs/photos                        # Ctrl-C ends it
  snclr explore runs/photos runs/other             # compares two runs
  snclr explore runs/photos --data new-photos/     # shows other images
  snclr explore runs/photos --gallery archive/     # also searches a folder
  snclr explore runs/photos --static pages/photos  # needs no server later

Needs pip install 'snclr[explore]'. The server listens on 127.0.0.1 only and answers at the printed address only. It
reads the run and writes nothing but the feature cache in RUN/evaluation. Runs in progress show live curves.
"""
_CURATE_EXAMPLES = """Examples:
  snclr curate runs/photos --out duplicates.txt --keep unique.txt
  snclr pretrain --data unique.txt --out runs/unique
  snclr curate runs/photos --find leaks --test test-photos/ --out leaks.txt
  snclr curate runs/photos --find labels --out suspects.txt
  snclr curate runs/photos --find diverse --number 500 --out label-these.txt
  snclr finetune runs/photos --data label-these.txt --labels 100%

Nothing is deleted. Each image of the list is below a comment with its reason. To label an image of a list, write a TAB
and the label after its path.
"""


def show_report(result: ReportResult) -> None:
    """Print the path and the sections that are missing."""
    print(f"wrote {result.report} ({size(result.bytes / 1e6)})")
    for section, reason in result.missing.items():
        print(f"  without {section}: {reason}")


def show_explore(result: ExploreResult) -> None:
    """Print the written folder; end the program at once if UMAP still runs, which cannot be cancelled."""
    if result.folder is not None:
        written = size(result.bytes / 1e6)
        print(f"wrote {result.folder}: {result.images:,} images, {result.files:,} files, {written}")
        print(f"open {result.folder}/index.html")
    sys.stdout.flush()
    if any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        os._exit(0)  # a normal end would abort in the middle of a computation


def show_curate(result: CurateResult) -> None:
    """Print what was found, with the first entries."""
    groups = "" if result.groups is None else f" in {result.groups:,} groups"
    print_wrapped(f"found {result.found:,} of {result.images:,} images{groups}; {result.protocol}")
    for entry in result.entries[:8]:
        print(f"  {entry['key']}")
        print_wrapped(entry["reason"], indent="    ")
    if result.found > 8:
        print(f"  … and {result.found - 8:,} more")
    print(f"wrote {result.file}")
    if result.keep:
        print(f"wrote {result.keep}: the other images")
    for warning in result.warnings:
        print_wrapped(f"warning: {warning}", sys.stderr)
    if result.skipped:
        print(f"unreadable images: {result.skipped:,}, left out of the lists")


COMMANDS = {
    "report": Command(
        report, show_report, _EXAMPLES, types={"runs": list[str]},
        flags={"k": Parameter(alias="--neighbors"), "runs": Parameter(name="MORE-RUNS")},
    ),
    "explore": Command(explore, show_explore, _EXPLORE_EXAMPLES, without=("on_ready",)),
    "curate": Command(curate, show_curate, _CURATE_EXAMPLES),
}  # fmt: skip
