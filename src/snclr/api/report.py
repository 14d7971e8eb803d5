"""`snclr.report`: write the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snclr.reports.build import ReportResult


def report(
    run: str | Path,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    images: int = 2_000,
    rows: int = 6,
    k: int = 5,
    embeddings: bool = True,
    seed: int = 0,
    workers: int = 0,
    device: str = "auto",
    cache: bool = True,
    quiet: bool = False,
) -> ReportResult:
    """Write one self-contained HTML page about a run, complete or in progress.

    The page shows training curves, images with their neighbors, a map of the images, evaluations with their protocols,
    bad images and settings. It loads nothing from the network.

    Args:
        run: Run directory, the --out of snclr pretrain.
        out: HTML file to write (default: RUN/report.html).
        data: Images to show (default: the run's training data).
        images: Maximum number of images on the map; larger datasets are sampled.
        rows: Images shown with their neighbors.
        k: Neighbors per image.
        embeddings: Encode images for the neighbors and the map; --no-embeddings is faster.
        seed: Seed of the image sample.
        workers: Dataloader worker processes.
        device: auto, cpu, cuda, cuda:1 or mps.
        cache: Read and write features in RUN/evaluation/features.
        quiet: Print no progress.
    """
    from snclr.checkpoint.run_dir import open_run
    from snclr.evaluation.session import open_session
    from snclr.reports.build import ReportOptions, report_path, write_report

    options = ReportOptions(images, rows, k, embeddings, seed)
    run_dir = open_run(run)
    path = report_path(run_dir, out)
    with open_session(run, workers=workers, device=device, cache=cache, quiet=quiet) as session:
        return write_report(session, run_dir, path, options, data)
