"""`snclr report`: one self-contained page about a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from snclr.commands.evaluation import Session, data_of, finish, session
from snclr.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from snclr.data.sources import Source
    from snclr.evaluate.features import Features
    from snclr.report.page import Missing, Page
    from snclr.train.run_folder import RunFolder

MOST_IMAGES, MOST_ROWS, MOST_NEIGHBORS = 5_000, 24, 20
EXAMPLES = """examples:
  snclr report runs/photos                                # writes runs/photos/report.html
  snclr report runs/photos --out photos.html --rows 12 --images 500
  snclr report runs/photos --no-embeddings                # encodes nothing: curves, results and settings

One HTML file with everything in it: training curves, images with their neighbours, a map of the images, evaluations
with their protocols, bad images, settings. It loads nothing from anywhere and can be sent as it is. A run in progress
has a page too; what it cannot show yet, it says.
"""
_Part = TypeVar("_Part")


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
) -> dict[str, Any]:
    """Write the page; its path and size, which sections it has, and why others are missing.

    `images` bounds how many images of `data` (default: the run's own) are encoded, for the map and, unless
    `snclr neighbors` has drawn them already, for the `rows` of `k` neighbours. `embeddings=False` encodes none.
    """
    from snclr.evaluate.resume import Interrupted
    from snclr.report.embedding_map import EmbeddingMap
    from snclr.report.page import render_within
    from snclr.train.run_folder import open_run

    _check(images, rows, k)
    folder = open_run(run)
    path = _place(folder, out)
    with session(device=device, cache=cache, quiet=quiet) as at:
        try:
            page = _gather(at, folder, data, images, rows, k, embeddings=embeddings, seed=seed, workers=workers)
        except Interrupted as error:
            return at.stopped("report", error)
        html, shown = render_within(page)
        if at.first:
            _write(path, html)
    return {
        "report": str(path), "bytes": len(html.encode()), "included": shown.included(), "missing": shown.missing(),
        "images": len(shown.map.keys) if isinstance(shown.map, EmbeddingMap) else 0, "evaluations": len(shown.results),
        "bad_images": len(shown.skipped),
    }  # fmt: skip


def _check(images: int, rows: int, k: int) -> None:
    for name, value, low, high in (
        ("images", images, 3, MOST_IMAGES), ("rows", rows, 1, MOST_ROWS), ("k", k, 1, MOST_NEIGHBORS)
    ):  # fmt: skip
        if not low <= value <= high:
            raise UserError(f"{name} is {value}; a page takes {low} to {high:,}")


def _place(folder: RunFolder, out: str | Path | None) -> Path:
    path = folder.report if out is None else Path(out)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"the page {path} must be a file that ends in .html")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} in; make it, or choose another --out")
    return path


def _write(path: Path, html: str) -> None:
    from snclr.durable import write_atomic

    try:
        write_atomic(path, html)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); choose another place with --out") from error


def _gather(
    at: Session, folder: RunFolder, data: str | None, images: int, rows: int, k: int, *, embeddings: bool, seed: int,
    workers: int,
) -> Page:  # fmt: skip
    """Everything the page shows; a part that cannot be had is replaced by its reason."""
    from snclr import __version__
    from snclr.data.sources import open_source
    from snclr.evaluate.results import read_results
    from snclr.report.page import Missing, Page
    from snclr.train.metrics import read_metrics
    from snclr.train.saved_run import read_config

    records = _or_why(lambda: read_metrics(folder.path))
    if records == []:
        records = Missing(f"{folder.metrics.name} has no line yet" if folder.metrics.exists() else _no(folder.metrics))
    settings = _or_why(lambda: read_config(folder.config)) if folder.config.exists() else Missing(_no(folder.config))
    source = _or_why(lambda: at.open(lambda: open_source(data or data_of(folder.path))))
    gallery: Any
    mapped: Any
    if isinstance(source, Missing):
        gallery = mapped = source
    else:
        gallery, mapped = _look(at, folder, source, images, rows, k, embeddings=embeddings, seed=seed, workers=workers)
    return Page(
        folder.path.resolve().name or str(folder.path), __version__, complete=folder.encoder_weights.is_file(),
        settings=settings, records=records, results=read_results(folder.path), skipped=_lines(folder.skipped),
        gallery=gallery, map=mapped, images=None if isinstance(source, Missing) or data else len(source),
        alerts=_alerts(folder, records), written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _look(
    at: Session, folder: RunFolder, source: Source, images: int, rows: int, k: int, *, embeddings: bool, seed: int,
    workers: int,
) -> tuple[Any, Any]:  # fmt: skip
    """The gallery and the map, or why not."""
    from snclr.report.page import Missing
    from snclr.report.run_images import find_gallery, find_map, sample, saved_gallery

    def extract(network: nn.Module, source: Source, role: str, image_size: int, words: str) -> Features:
        return at.features(
            folder.path, network, source, image_size=image_size, role=role, workers=workers, description=words
        )

    gallery: Any = saved_gallery(folder, source, rows=rows, k=k)
    if not embeddings:
        left_out = Missing("features were not asked for (--no-embeddings)")
        return gallery or left_out, left_out
    some = sample(source, images, seed)
    if gallery is None:
        gallery = _or_why(lambda: find_gallery(folder.path, some, extract, rows=rows, k=k, seed=seed, device=at.device))
    return gallery, _or_why(lambda: find_map(folder.path, some, extract, device=at.device))


def _or_why(make: Callable[[], _Part]) -> _Part | Missing:
    """A part of the page, or the reason that a person is to read in its place."""
    from snclr.report.page import Missing

    try:
        return make()
    except UserError as error:
        return Missing(str(error))


def _no(path: Path) -> str:
    return f"the folder has no {path.name}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; a line that is none is passed over."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        found += [record] if isinstance(record, dict) else []
    return found


def _alerts(folder: RunFolder, records: Any) -> list[str]:
    """What a person must not overlook."""
    alerts = []
    steps = (
        [record["step"] for record in records if record.get("collapsed") is True] if isinstance(records, list) else []
    )
    if steps:
        alerts.append(
            f"The features had collapsed (spread below 0.1 or effective rank below 2) at {len(steps):,} logged steps, "
            f"first at step {steps[0]:,}, last at step {steps[-1]:,}."
        )
    for stop in _lines(folder.nonfinite) or ([{}] if folder.nonfinite.is_file() else []):
        alerts.append(
            f"Training stopped at step {stop.get('step', '?')}: loss {stop.get('loss', '?')}, gradient norm "
            f"{stop.get('gradient_norm', '?')}. The images of that step are in {folder.nonfinite.name}."
        )
        break
    return alerts


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument("--out", metavar="HTML", help="the page (default: RUN/report.html)")
    parser.add_argument("--data", help="the images to show (default: the run's own)")
    parser.add_argument(
        "--images",
        type=int,
        default=2_000,
        metavar="N",
        help="images on the map, chosen by the seed where there are more",
    )
    parser.add_argument("--rows", type=int, default=6, metavar="N", help="images shown with their neighbours")
    parser.add_argument("--k", "--neighbors", dest="k", type=int, default=5, metavar="N", help="neighbours of each")
    parser.add_argument("--no-embeddings", action="store_true", help="encode no images: no map; quick on large data")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which images are shown")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor keep features in RUN/evaluation/features"
    )
    parser.add_argument("--json", action="store_true", help="print path and content as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    found = report(
        a.run, out=a.out, data=a.data, images=a.images, rows=a.rows, k=a.k, embeddings=not a.no_embeddings, seed=a.seed,
        workers=a.workers, device=a.device, cache=not a.no_cache, quiet=a.json,
    )  # fmt: skip
    return finish(found, a, _show)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print(f"wrote {found['report']} ({found['bytes'] / 1e6:.1f} MB): open it in a browser, or send it")
    for part, why in found["missing"].items():
        print(f"  without {part}: {why}")
