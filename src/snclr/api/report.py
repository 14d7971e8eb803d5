"""`snclr.report`: write the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snclr.api.early_checks import check_file, check_run_and_data
from snclr.errors import UserError
from snclr.reports.class_names import read_class_names

if TYPE_CHECKING:
    from snclr.reports.build import ReportResult


def report(
    run: str | Path,
    runs: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path | None = None,
    data: str | None = None,
    images: int = 2_000,
    rows: int = 6,
    k: int = 5,
    embeddings: bool = True,
    class_names: str | Path | None = None,
    seed: int = 0,
    workers: int = 0,
    device: str = "auto",
    cache: bool = True,
    quiet: bool = False,
) -> ReportResult:
    """Write one self-contained HTML page about a run, complete or in progress.

    The page shows training curves, images with their neighbors, a map of the images, evaluations with their protocols,
    bad images and settings. It loads nothing from the network. With several runs, the page shows their curves in common
    charts, a table of results with a column per run, and the settings that differ; it encodes no images.

    Args:
        run: Run directory, the --out of snclr pretrain.
        runs: Further run directories, to overlay.
        out: HTML file to write (default: RUN/report.html, or RUN/report-runs.html with several runs).
        data: Images to show (default: the run's training data).
        images: Maximum number of images on the map; larger datasets are sampled.
        rows: Images shown with their neighbors.
        k: Neighbors per image.
        embeddings: Encode images for the neighbors and the map; --no-embeddings is faster.
        class_names: File with the names of the classes, in the order of their numbers: one per line, or a JSON list.
        seed: Seed of the image sample.
        workers: Dataloader worker processes.
        device: Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one.
        cache: Read and write features in RUN/evaluation/features.
        quiet: Print no progress.
    """
    others = [runs] if isinstance(runs, (str, Path)) else list(runs)
    for each in (run, *others):
        check_run_and_data(each, data)
    names = None if class_names is None else read_class_names(class_names)
    check_file(out, suffixes=(".html", ".htm"))
    from snclr.checkpoint.run_dir import open_run
    from snclr.evaluation.session import open_session
    from snclr.reports.build import ReportOptions, write_report

    if others:
        from snclr.reports.overlay import write_overlay

        if data is not None or class_names is not None:
            raise UserError("--data and --class-names apply to the report of one run. Omit them, or give one run")
        run_dirs = [open_run(one) for one in (run, *others)]
        return write_overlay(run_dirs, run_dirs[0].runs_report if out is None else Path(out))
    options = ReportOptions(images, rows, k, embeddings, seed, names)
    run_dir = open_run(run)
    path = run_dir.report if out is None else Path(out)
    with open_session(run, workers=workers, device=device, cache=cache, quiet=quiet) as session:
        return write_report(session, run_dir, path, options, data)
