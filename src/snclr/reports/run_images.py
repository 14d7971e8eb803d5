"""The gallery and the embedding map of a run, computed from a seeded sample of its images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import BadImage, RGBImage
from snclr.data.sampler import epoch_order
from snclr.data.splits import Subset
from snclr.errors import UserError
from snclr.evaluation.features import Features
from snclr.evaluation.retrieval import gallery as retrieval
from snclr.evaluation.retrieval.neighbors import pick_queries
from snclr.evaluation.retrieval.query_images import class_names
from snclr.evaluation.retrieval.space import open_space
from snclr.evaluation.session import Session
from snclr.reports.embedding_map import TILE, EmbeddingMap, project
from snclr.reports.page import SIDE, Gallery, GalleryImage
from snclr.reports.thumbnails import square_tile, thumbnail_uri
from snclr.train.saved_run import load_trained_method

if TYPE_CHECKING:
    from snclr.reports.build import ReportOptions

T = TypeVar("T")


def sample(dataset: ImageDataset, count: int, seed: int) -> ImageDataset:
    """Return a seeded subset of at most `count` images; keys and order are kept."""
    if len(dataset) <= count:
        return dataset
    return Subset(dataset, np.sort(epoch_order(len(dataset), seed, epoch=0)[:count]))


def compute_gallery(session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions) -> Gallery:
    """Find the neighbors of some images among the whole dataset, in the run's own embedding space."""
    space = open_space(run.path, device=session.device)

    def extract(network: nn.Module, role: str) -> Features:
        return session.features(
            run.path, network, dataset, image_size=space.image_size, role=role, workers=options.workers,
            description="neighbors",
        )  # fmt: skip

    y2 = extract(space.search, space.role)
    if len(y2.ids) < 2:
        raise UserError(f"neighbors need at least two readable images; {dataset.name} has {len(y2.ids)}")
    y1 = y2 if space.attend is None else extract(space.attend, "y1")
    queries = retrieval.Queries(dataset, y2, y1.features).take(pick_queries(y2, len(y2.ids), seed=options.seed))
    gallery = retrieval.Gallery.from_features(y2, dataset)
    ranked, _ = retrieval.neighbor_rows(queries, gallery, options.k, weigh=space.weigh)
    rows = [
        (
            GalleryImage(row.key, row.label, _uri(dataset, row.index)),
            [GalleryImage(n.key, n.label, _uri(dataset, n.index), n.w, n.cosine, n.same_class) for n in row.neighbors],
        )
        for row in ranked[: options.rows]
    ]
    protocol = (
        f"The {options.k} nearest neighbors by cosine similarity of {space.description}. Gallery: "
        f"{gallery.description}, without the query itself; center crops; purity over all {len(ranked):,} images; "
        f"seed {options.seed}."
    )
    return Gallery(rows, protocol, retrieval.same_class_share(ranked))


def compute_map(session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions) -> EmbeddingMap:
    """Project the features of the exported encoder, or of the last checkpoint, to two dimensions."""
    encoder, image_size, role = _encoder(run, session.device)
    features = session.features(
        run.path, encoder, dataset, image_size=image_size, role=role, workers=options.workers, description="map"
    )
    ids = features.ids.tolist()
    if len(ids) < 3:
        raise UserError(f"a map needs at least three readable images; {dataset.name} has {len(ids)}")
    points, explained = project(F.normalize(features.features, dim=1).double().numpy())
    classes = class_names(dataset, features.ids)
    blank = np.full((TILE, TILE, 3), 128, np.uint8)
    tiles = [_read(dataset, index, lambda image: square_tile(image, TILE)) for index in ids]
    protocol = (
        f"L2-normalized encoder features of {len(ids):,} images of {dataset.name}, projected onto the first two "
        f"principal components. They explain {explained[0]:.1%} and {explained[1]:.1%} of the variance, so images that "
        "are close on the map may be far apart in feature space. Labels are used for the colors only."
    )
    labeled = classes is not None and any(label is not None for label in classes)
    return EmbeddingMap(
        points, [dataset.key(index) for index in ids], classes if labeled else None,
        np.stack([blank if tile is None else tile for tile in tiles]), protocol,
    )  # fmt: skip


def _encoder(run: RunDir, device: str) -> tuple[nn.Module, int, str]:
    """Return the encoder, its image size, and its role in the feature cache."""
    if run.encoder_weights.is_file():
        encoder, spec = load_encoder(run.path)
        return encoder, spec.image_size, "encoder"
    method, config = load_trained_method(run.path, torch.device(device))
    return method.encoder, config.image_size, "checkpoint"


def _uri(dataset: ImageDataset, index: int) -> str | None:
    return _read(dataset, index, lambda image: thumbnail_uri(image, SIDE))


def _read(dataset: ImageDataset, index: int, convert: Callable[[RGBImage], T]) -> T | None:
    """Load and convert an image; None if it cannot be read any more."""
    try:
        return convert(dataset.load(index, SIDE))
    except BadImage:
        return None
