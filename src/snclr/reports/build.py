"""Build the report of one run or several: read files, compute neighbors and map from a sample of images, write."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.decode import load_or_none
from snclr.data.labels import chance_levels
from snclr.data.splits import sample
from snclr.errors import UserError, snclr_command
from snclr.evaluation.analysis.layout import pca
from snclr.evaluation.results import read_results
from snclr.evaluation.retrieval import gallery as retrieval
from snclr.evaluation.retrieval.neighbors import sampled_queries
from snclr.evaluation.retrieval.space import open_space
from snclr.evaluation.session import Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.io.atomic import explain_unwritable, write_atomic
from snclr.io.jsonl import parse_record, read_jsonl
from snclr.reports.classes import classify_again, rename_classes
from snclr.reports.embedding_map import COLORS, TILE, EmbeddingMap, build_map
from snclr.reports.page import SIDE, NeighborSection, Page, render_overlay, render_within
from snclr.reports.run_state import read_alerts, read_state
from snclr.reports.thumbnails import square_tile, thumbnail_uri
from snclr.runtime.progress import set_status
from snclr.runtime.results import Result
from snclr.train.config import read_config
from snclr.train.load_run import load_trained_method
from snclr.train.metrics import with_current_names
from snclr.train.sessions import read_sessions

_NOT_ENCODED = "images were not encoded (--no-embeddings)"
T = TypeVar("T")


@dataclass(frozen=True)
class ReportOptions:
    """What to show: at most `images` images on the map, and `rows` images with `k` neighbors each."""

    images: int = 2_000
    rows: int = 6
    k: int = 5
    embeddings: bool = True
    """False encodes no images."""
    seed: int = 0
    class_names: Sequence[str] | None = None
    """Names to show instead of the dataset's own, by class number."""


@dataclass(frozen=True)
class ReportResult(Result):
    """A written report: its path and size, which sections it has, and why others are missing."""

    report: str
    bytes: int
    included: dict[str, bool]
    missing: dict[str, str]
    images: int
    """Images on the map."""
    evaluations: int
    bad_images: int


def write_report(
    session: Session, run: RunDir, path: Path, options: ReportOptions, data: str | None = None
) -> ReportResult:
    """Build the page and write it on rank 0; `data` replaces the run's own images."""
    set_status("building the page")
    page, explore = build_page(session, run, options, data), run.explore / "index.html"
    if explore.is_file():  # `snclr explore --static RUN/explore` wrote it
        page = replace(page, explore_link=Path(os.path.relpath(explore, path.parent)).as_posix())
    html, page = render_within(page)
    on_rank_zero(lambda: write_html(path, html))
    included = page.included()
    missing = {name: page.missing[name] for name in included if name in page.missing}
    return ReportResult(
        str(path), len(html.encode()), included, missing,
        images=len(page.map.dots) if page.map else 0, evaluations=len(page.results), bad_images=len(page.skipped),
    )  # fmt: skip


def write_overlay(runs: Sequence[RunDir], path: Path) -> ReportResult:
    """Write the page of two runs or more; it encodes no images."""
    if len(runs) > COLORS:
        raise UserError(f"{len(runs)} runs were given; a chart has colors for {COLORS}")
    names = [run.path.resolve().name for run in runs]
    pages = [
        _read_for_overlay(run, name if names.count(name) == 1 else str(run.path))
        for run, name in zip(runs, names, strict=True)
    ]
    html = render_overlay(pages)
    write_html(path, html)
    included = {
        name: any(page.included()[name] for page in pages) for name in ("curves", "evaluations", "configuration")
    }
    return ReportResult(
        str(path), len(html.encode()), included,
        {f"{section} of {page.run}": reason for page in pages for section, reason in page.missing.items()},
        images=0, evaluations=sum(len(page.results) for page in pages),
        bad_images=sum(len(page.skipped) for page in pages),
    )  # fmt: skip


def _read_for_overlay(run: RunDir, name: str) -> Page:
    """Read the files of a run, and the chance level of its neighbor purity if that was logged."""
    page = replace(read_page(run), run=name)
    if any("neighbor_purity" in record for record in page.records):
        with contextlib.suppress(UserError):
            return replace(page, chance=chance_levels(open_dataset(data_of(run.path)).labels))
    return page


def write_html(path: Path, html: str) -> None:
    """Write a page, or raise UserError."""
    with explain_unwritable(path, "choose another --out"):
        write_atomic(path, html)


def build_page(session: Session, run: RunDir, options: ReportOptions, data: str | None = None) -> Page:
    """Collect the content of the page; a section that is not available is replaced by the reason."""
    page = read_page(run)
    missing, neighbors, embedding_map, classes = dict(page.missing), None, None, None
    dataset = _try(lambda: session.open(lambda: open_dataset(data or data_of(run.path))), missing, "neighbors", "map")
    if dataset is not None:
        rename_classes(dataset, options.class_names)
    if not options.embeddings:
        missing = dict.fromkeys(("neighbors", "map", "classes"), _NOT_ENCODED) | missing
    else:
        if dataset is not None:
            some = sample(dataset, options.images, options.seed)
            neighbors = _try(lambda: compute_neighbors(session, run, some, options), missing, "neighbors")
            embedding_map = _try(lambda: compute_map(session, run, some), missing, "map")
        classes = _try(lambda: classify_again(session, page.results, options.class_names), missing, "classes")
    if dataset is not None and not data:
        page = replace(page, images=len(dataset), chance=chance_levels(dataset.labels))
    return replace(page, missing=missing, neighbors=neighbors, map=embedding_map, classes=classes)


def read_page(run: RunDir) -> Page:
    """Read the files of a run: the page without what its images are needed for."""
    missing: dict[str, str] = {}
    settings = None
    if not run.config.exists():
        missing["configuration"] = f"there is no {run.config.name}"
    else:
        settings = _try(lambda: read_config(run.config), missing, "configuration")
    records = [with_current_names(record) for record in read_jsonl(run.metrics, fields={"step": int})]
    invalid_lines = count_invalid_lines(run)
    if not run.metrics.is_file():
        missing["curves"] = f"there is no {run.metrics.name}"
    elif not records:
        missing["curves"] = f"{run.metrics.name} {'has no valid record' if invalid_lines else 'is empty'}"
    sessions = read_sessions(run.path)
    return Page(
        run.path.resolve().name or str(run.path), read_state(run, sessions, records), settings or {}, records,
        invalid_lines, read_results(run.path), skipped=read_jsonl(run.skipped), missing=missing, sessions=sessions,
        alerts=read_alerts(run, records), explore_command=snclr_command("explore", run.path),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _try(compute: Callable[[], T], missing: dict[str, str], *sections: str) -> T | None:
    """Return a part of the page; None, with the reason in `missing` for its sections, if it is not available."""
    try:
        return compute()
    except UserError as error:
        missing |= dict.fromkeys(sections, str(error))
        return None


def count_invalid_lines(run: RunDir) -> int:
    """Return the number of lines of metrics.jsonl that are not records.

    A last line without a line break is not counted: a running training may be writing it.
    """
    lines = run.metrics.read_bytes().split(b"\n")[:-1] if run.metrics.is_file() else []
    return sum(bool(line.strip()) and parse_record(line, {"step": int}) is None for line in lines)


def compute_neighbors(session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions) -> NeighborSection:
    """Find the neighbors of some images among the whole dataset, in the run's own embedding space."""
    space = open_space(run.path, device=session.device)
    (queries,), gallery, _ = sampled_queries(session, space, dataset, None, most=len(dataset), seed=options.seed)
    if len(gallery.ids) < 2:
        raise UserError(f"neighbors need at least two readable images; {dataset.name} has {len(gallery.ids)}")
    ranked, weights = retrieval.rank_as_trained(queries, gallery, options.k, space), space.describe_weights(options.k)
    rows = ranked[: options.rows]
    shown = {row.index for row in rows} | {neighbor.index for row in rows for neighbor in row.neighbors}
    images_shown = {index: load_or_none(dataset.load, index, SIDE) for index in shown}
    uris = {i: None if image is None else thumbnail_uri(image, SIDE) for i, image in images_shown.items()}
    purity, chance, description = retrieval.measure_purity(ranked, gallery)
    measured = (
        f" neighbor purity over all {len(ranked):,} images ({description});"
        if any(share is not None for share in purity)
        else ""
    )
    protocol = (
        f"The {options.k} nearest neighbors by cosine similarity of {space.description}. Gallery: "
        f"{gallery.description}, without the query itself; center crops;{measured} seed {options.seed}."
    )
    return NeighborSection(rows, uris, protocol, purity, None if weights is None else f"{weights}.", chance)


def compute_map(session: Session, run: RunDir, dataset: ImageDataset) -> EmbeddingMap:
    """Project the features of the exported encoder, or of the last checkpoint, to two dimensions."""
    encoder, image_size, role = _encoder(run, session.device)
    features = session.features(encoder, dataset, image_size=image_size, role=role, description="map")
    ids = features.ids.tolist()
    if len(ids) < 3:
        raise UserError(f"a map needs at least three readable images; {dataset.name} has {len(ids)}")
    layout = pca(features.features.double())
    first, second = layout.explained
    classes = [dataset.class_name(index) for index in ids]
    blank = np.full((TILE, TILE, 3), 128, np.uint8)
    loaded = (load_or_none(dataset.load, index, SIDE) for index in ids)
    tiles = [blank if image is None else square_tile(image, TILE) for image in loaded]
    protocol = (
        f"L2-normalized encoder features of {len(ids):,} images of {dataset.name}, projected onto the first two "
        f"principal components. They explain {first:.1%} and {second:.1%} of the variance, so images that are close on "
        "the map may be far apart in feature space."
    )
    if any(classes):
        protocol += " Labels are used for the colors only."
    keys = [dataset.key(index) for index in ids]
    return build_map(layout.points.astype(np.float64), keys, classes, np.stack(tiles), protocol)


def _encoder(run: RunDir, device: str) -> tuple[nn.Module, int, str]:
    """Return the encoder, its image size, and its role in the feature cache."""
    if run.encoder_weights.is_file():
        encoder, spec = load_encoder(run.path)
        return encoder, spec.image_size, "encoder"
    method, config = load_trained_method(run.path, torch.device(device))
    return method.exported_encoder, config.image_size, "checkpoint"
