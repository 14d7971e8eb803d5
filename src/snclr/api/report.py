"""HTML reports, the local web page and list files of images: `snclr.report`, `snclr.explore`, `snclr.curate`."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snclr.api.early_checks import check_file, check_folder, check_numbers, check_run_and_data, checked_session
from snclr.api.options import SessionOptions, with_options
from snclr.errors import UserError
from snclr.evaluation.results import CurateResult
from snclr.explorer.listen import open_socket
from snclr.explorer.results import ExploreResult
from snclr.reports.text import read_class_names
from snclr.runtime.progress import set_torch_status
from snclr.runtime.settings import Range

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    check_numbers(Range(ge=3, le=5_000), images=images)
    check_numbers(Range(ge=1, le=24), rows=rows)
    check_numbers(Range(ge=1, le=20), k=k)
    others = [runs] if isinstance(runs, (str, Path)) else list(runs)
    for each in (run, *others):
        check_run_and_data(each, data, device=device)
    names = None if class_names is None else read_class_names(class_names)
    check_file(out, suffixes=(".html", ".htm"))
    from snclr.checkpoint.run_dir import open_run

    if others:
        if data is not None or class_names is not None:
            raise UserError("--data and --class-names apply to the report of one run. Omit them, or give one run")
        run_dirs = [open_run(one) for one in (run, *others)]
        if len({one.path.resolve() for one in run_dirs}) < len(run_dirs):
            raise UserError("a run was given twice. Give each run once.")
        from snclr.reports.build import write_overlay

        return write_overlay(run_dirs, run_dirs[0].runs_report if out is None else Path(out))
    set_torch_status()
    from snclr.evaluation.session import open_session
    from snclr.reports.build import ReportOptions, write_report

    options = ReportOptions(images, rows, k, embeddings, seed, names)
    run_dir = open_run(run)
    with open_session(run, workers=workers, device=device, cache=cache, quiet=quiet) as session:
        return write_report(session, run_dir, run_dir.report if out is None else Path(out), options, data)


def explore(
    run: str | Path,
    other: str | Path | None = None,
    *,
    data: str | None = None,
    test: str | None = None,
    gallery: str | None = None,
    port: int = 8811,
    static: str | Path | None = None,
    images: int = 1_000,
    overwrite: bool = False,
    device: str = "auto",
    cache: bool = True,
    quiet: bool = False,
    on_ready: Callable[[str], None] = print,
) -> ExploreResult:
    """Open a run in the browser: neighbors, map, training, time, comparison, views and curation.

    A server on 127.0.0.1 serves the page until Ctrl-C. Features are read from RUN/evaluation/features, and computed in
    the background if they are missing. With `static`, the page is written to a folder that opens without a server.

    Args:
        run: Run directory, the --out of snclr pretrain, complete or in progress.
        other: Second run, or folder of snclr import, to compare with.
        data: Images to explore: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Test images to search for leaks (default: the test split of the data, if it has one).
        gallery: Another folder of images to search in.
        port: Port on 127.0.0.1, up to 65535; 0 chooses a free one.
        static: Folder to write instead of serving.
        images: Maximum number of images in a static folder; larger datasets are sampled.
        overwrite: Replace an earlier static folder.
        device: Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one.
        cache: Read and write features in RUN/evaluation/features.
        quiet: Print no progress.
        on_ready: Called with the address when the server is ready.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"snclr explore needs {' and '.join(missing)}: pip install 'snclr[explore]'")
    check_numbers(Range(ge=3), images=images)
    check_folder(static, flag="--static")
    check_run_and_data(run, data, test, gallery, device=device)
    with ExitStack() as stack:
        if static is None:
            listener = stack.enter_context(open_socket(port))
        set_torch_status()
        from snclr.evaluation.session import open_session
        from snclr.explorer import static as static_folder
        from snclr.explorer.explorer import Explorer
        from snclr.explorer.server import make_server

        if static is not None:
            static_folder.check_folder(Path(static), overwrite=overwrite)
        session = stack.enter_context(open_session(run, device=device, cache=cache, quiet=True))
        explorer = Explorer(session, other, data=data, test=test, gallery=gallery, served=static is None)
        stack.callback(explorer.jobs.close, seconds=5.0)
        if static is not None:
            return static_folder.write_static(explorer, Path(static), images=images, quiet=quiet)
        token = secrets.token_urlsafe(24)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        explorer.start()
        server = make_server(explorer, listener.getsockname()[1], token)
        if not quiet:
            print(f"exploring {explorer.opening()}; open this address in a browser, Ctrl-C ends it:", file=sys.stderr)
        on_ready(address)
        server.run(sockets=[listener])
    return ExploreResult(address)


@with_options(SessionOptions)
def curate(
    run: str | Path,
    *,
    out: str | Path,
    find: Literal["duplicates", "leaks", "outliers", "labels", "diverse"] = "duplicates",
    keep: str | Path | None = None,
    data: str | None = None,
    test: str | None = None,
    threshold: float = 0.95,
    number: int = 100,
    k: int = 20,
    overwrite: bool = False,
    **options: Unpack[SessionOptions],
) -> CurateResult:
    """Find near-duplicates, leaks, outliers, suspect labels or a diverse subset, and write them as a list file.

    Each entry of the list has its reason as a comment. `--data` and `finetune --labels` read the list. No image is
    changed or deleted.

    Args:
        run: Run directory, the --out of snclr pretrain.
        out: List file to write: the images found, each below its reason.
        find: duplicates: all but the first image of each group of near-duplicates. leaks: test images with a
            near-duplicate in the training images. outliers: the images least like their neighbors. labels: images
            whose neighbors vote for another class. diverse: a subset that covers all images.
        keep: Second list file to write: all other images.
        data: Images: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Test images for leaks (default: the test split of the data).
        threshold: Smallest cosine of a near-duplicate, for duplicates and leaks.
        number: Number of images to list, for outliers, labels and diverse.
        k: Neighbors per image, for outliers and labels.
        overwrite: Replace an existing list file.
        options: Those of `SessionOptions`.
    """
    check_numbers(Range(ge=1), number=number, k=k)
    check_numbers(Range(ge=-1, le=1), threshold=threshold)
    check_file(out)
    check_file(keep, flag="--keep")
    with checked_session(run, data, test, **options) as session:
        from snclr.evaluation.analysis.curation import curate_run

        return curate_run(
            session, out=Path(out), find=find, keep=None if keep is None else Path(keep), data=data, test=test,
            threshold=threshold, number=number, k=k, overwrite=overwrite,
        )  # fmt: skip
