"""Print the result of `snclr report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import Parameter

from snclr.api.report import report
from snclr.cli.flags import Command

if TYPE_CHECKING:
    from snclr.reports.build import ReportResult

_EXAMPLES = """Examples:
  snclr report runs/photos                                # writes runs/photos/report.html
  snclr report runs/photos --out photos.html --rows 12 --images 500
  snclr report runs/photos runs/other                     # both runs in one page: runs/photos/report-runs.html
  snclr report runs/photos --class-names names.txt        # one class name per line, in the order of the classes
  snclr report runs/photos --no-embeddings                # encodes no images: curves, results and settings

One HTML file: training curves, images with their neighbors, a map of the images, evaluations with their protocols, bad
images and settings. It loads nothing from the network, so it can be sent by email. Runs in progress have a report too.
"""


def show_report(result: ReportResult) -> None:
    """Print the path and the sections that are missing."""
    print(f"wrote {result.report} ({result.bytes / 1e6:.1f} MB)")
    for section, reason in result.missing.items():
        print(f"  without {section}: {reason}")


COMMANDS = {
    "report": Command(
        function=report,
        show=show_report,
        examples=_EXAMPLES,
        types={"runs": list[str]},
        flags={"k": Parameter(alias="--neighbors"), "runs": Parameter(name="MORE-RUNS")},
    )
}
