"""Build the report of a run: read its files, compute neighbors and map from a sample of its images, write the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from snclr import __version__
from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.decode import load_or_none
from snclr.data.labels import same_class_chance
from snclr.data.splits import sample
from snclr.errors import UserError, snclr_command
from snclr.evaluation.analysis.layout import pca
from snclr.evaluation.results import read_results
from snclr.evaluation.retrieval import gallery as retrieval
from snclr.evaluation.retrieval.neighbors import pick_queries
from snclr.evaluation.retrieval.space import open_space
from snclr.evaluation.session import Session, data_of
from snclr.io.atomic import explain_unwritable, write_atomic
from snclr.io.jsonl import parse_record, read_jsonl
from snclr.reports.classes import ClassTable, classify_again, rename_classes
from snclr.reports.embedding_map import TILE, EmbeddingMap, build_map
from snclr.reports.page import SIDE, Missing, NeighborSection, Page, render_within
from snclr.reports.run_state import read_alerts, read_state
from snclr.reports.thumbnails import square_tile, thumbnail_uri
from snclr.runtime.progress import set_status
from snclr.runtime.results import Result
from snclr.train.config import read_config
from snclr.train.load_run import load_trained_method
from snclr.train.metrics import with_current_names
from snclr.train.sessions import read_sessions

LIMITS = {"images": (3, 5_000), "rows": (1, 24), "k": (1, 20)}
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

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UserError(f"{name} is {value}; a report takes {low} to {high:,}")


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
    content = build_page(session, run, options, data)
    html, page = render_within(replace(content, explore_link=_explore_link(run, path)))
    if session.is_rank_zero:
        write_html(path, html)
    return ReportResult(
        str(path), len(html.encode()), page.included(), page.missing(),
        images=len(page.map.dots) if isinstance(page.map, EmbeddingMap) else 0, evaluations=len(page.results),
        bad_images=len(page.skipped),
    )  # fmt: skip


def write_html(path: Path, html: str) -> None:
    """Write a page, or raise UserError."""
    with explain_unwritable(path, "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, html)


def build_page(session: Session, run: RunDir, options: ReportOptions, data: str | None = None) -> Page:
    """Collect the content of the page; a part that is not available is replaced by the reason."""
    records, invalid_lines = read_valid_metrics(run)
    sessions = read_sessions(run.path)
    settings: Any = Missing(f"there is no {run.config.name}")
    if run.config.exists():
        settings = or_missing(lambda: read_config(run.config))
    dataset = or_missing(lambda: session.open(lambda: open_dataset(data or data_of(run.path))))
    if not isinstance(dataset, Missing):
        rename_classes(dataset, options.class_names)
    results = read_results(run.path)
    reason = dataset if isinstance(dataset, Missing) else Missing(_NOT_ENCODED)
    neighbors: NeighborSection | Missing = reason
    embedding_map: EmbeddingMap | Missing = reason
    classes: ClassTable | Missing | None = Missing(_NOT_ENCODED)
    if options.embeddings:
        if not isinstance(dataset, Missing):
            some = sample(dataset, options.images, options.seed)
            neighbors = or_missing(lambda: compute_neighbors(session, run, some, options))
            embedding_map = or_missing(lambda: compute_map(session, run, some, options))
        classes = or_missing(lambda: classify_again(session, results, options.class_names))
    logged = () if isinstance(records, Missing) else records
    trained = None if isinstance(dataset, Missing) or data else dataset
    return Page(
        run.path.resolve().name or str(run.path), __version__,
        state=read_state(run, sessions, logged),
        settings=settings, records=records, invalid_lines=invalid_lines,
        results=results, classes=classes, skipped=read_jsonl(run.skipped),
        neighbors=neighbors, map=embedding_map, images=None if trained is None else len(trained),
        purity_chance=None if trained is None else same_class_chance(trained.labels),
        alerts=read_alerts(run, logged), explore_command=snclr_command("explore", run.path), sessions=sessions,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def read_valid_metrics(run: RunDir) -> tuple[list[dict[str, Any]] | Missing, int]:
    """Return the valid records of metrics.jsonl and the number of other lines.

    A last line without a line break is not counted: a running training may be writing it.
    """
    if not run.metrics.is_file():
        return Missing(f"there is no {run.metrics.name}"), 0
    lines = run.metrics.read_bytes().split(b"\n")
    parsed = [parse_record(line, {"step": int}) for line in lines]
    records = [with_current_names(record) for record in parsed if record is not None]
    invalid = sum(record is None and bool(line.strip()) for line, record in zip(lines[:-1], parsed, strict=False))
    if records:
        return records, invalid
    return Missing(f"{run.metrics.name} has no valid record" if invalid else f"{run.metrics.name} is empty"), invalid


def compute_neighbors(session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions) -> NeighborSection:
    """Find the neighbors of some images among the whole dataset, in the run's own embedding space."""
    space = open_space(run.path, device=session.device)
    queries = retrieval.Queries.embed(session, space, dataset)
    images = len(queries.search.ids)
    if images < 2:
        raise UserError(f"neighbors need at least two readable images; {dataset.name} has {images}")
    gallery = retrieval.Gallery.from_features(
        queries.search, dataset, space.projections(session, dataset, "gallery (projections)")
    )
    queries = queries.take(pick_queries(queries.search, images, seed=options.seed))
    ranked, weights = retrieval.rank_as_trained(queries, gallery, options.k, space), space.describe_weights()
    rows = ranked[: options.rows]
    shown = {row.index for row in rows} | {neighbor.index for row in rows for neighbor in row.neighbors}
    images_shown = {index: load_or_none(dataset.load, index, SIDE) for index in shown}
    uris = {i: None if image is None else thumbnail_uri(image, SIDE) for i, image in images_shown.items()}
    purity, chance = retrieval.neighbor_purity(ranked), retrieval.purity_chance(ranked, gallery)
    measured = (
        f" neighbor purity over all {len(ranked):,} images ({retrieval.describe_purity(gallery, chance)});"
        if any(share is not None for share in purity)
        else ""
    )
    protocol = (
        f"The {options.k} nearest neighbors by cosine similarity of {space.description}. Gallery: "
        f"{gallery.description}, without the query itself; center crops;{measured} seed {options.seed}."
    )
    return NeighborSection(rows, uris, protocol, purity, None if weights is None else f"{weights}.", chance)


def compute_map(session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions) -> EmbeddingMap:
    """Project the features of the exported encoder, or of the last checkpoint, to two dimensions."""
    encoder, image_size, role = _encoder(run, session.device)
    features = session.features(encoder, dataset, image_size=image_size, role=role, description="map")
    ids = features.ids.tolist()
    if len(ids) < 3:
        raise UserError(f"a map needs at least three readable images; {dataset.name} has {len(ids)}")
    layout = pca(features.features.double())
    first, second = layout.explained or (0.0, 0.0)
    classes = [dataset.class_name(index) for index in ids]
    blank = np.full((TILE, TILE, 3), 128, np.uint8)
    loaded = (load_or_none(dataset.load, index, SIDE) for index in ids)
    tiles = [blank if image is None else square_tile(image, TILE) for image in loaded]
    protocol = (
        f"L2-normalized encoder features of {len(ids):,} images of {dataset.name}, projected onto the first two "
        f"principal components. They explain {first:.1%} and {second:.1%} of the variance, so images that are close on "
        "the map may be far apart in feature space."
    )
    labeled = any(label is not None for label in classes)
    protocol += " Labels are used for the colors only." if labeled else ""
    return build_map(
        layout.points.astype(np.float64), [dataset.key(index) for index in ids], classes if labeled else None,
        np.stack(tiles), protocol,
    )  # fmt: skip


def _encoder(run: RunDir, device: str) -> tuple[nn.Module, int, str]:
    """Return the encoder, its image size, and its role in the feature cache."""
    if run.encoder_weights.is_file():
        encoder, spec = load_encoder(run.path)
        return encoder, spec.image_size, "encoder"
    method, config = load_trained_method(run.path, torch.device(device))
    return method.exported_encoder, config.image_size, "checkpoint"


def or_missing(compute: Callable[[], T]) -> T | Missing:
    """Return a part of the page, or the reason why it is missing."""
    try:
        return compute()
    except UserError as error:
        return Missing(str(error))


def _explore_link(run: RunDir, report: Path) -> str | None:
    """Return the address of the page that `snclr explore --static RUN/explore` wrote, relative to the report."""
    page = run.explore / "index.html"
    return Path(os.path.relpath(page, report.parent)).as_posix() if page.is_file() else None
