"""Neighbor search in a gallery of images, shared by `neighbors`, `search`, `explain` and the report.

A query that is itself in the gallery is excluded: `same_images` decides which images are the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.decode import BadImage, RGBImage
from snclr.data.loader import Skip
from snclr.data.splits import same_images
from snclr.errors import UserError, count
from snclr.evaluation.features import Features
from snclr.evaluation.results import Neighbor, NeighborRow
from snclr.evaluation.retrieval.index import Hits, find_similar
from snclr.evaluation.retrieval.space import EmbeddingSpace, Weigh, weigh_by_cosine
from snclr.evaluation.session import Session, data_of
from snclr.methods.common.queue import NeighborQueue
from snclr.train.health import PURITY_OF_CENTER_CROPS, PURITY_OF_QUEUE

_ROWS = 1024  # queries weighted at once: their neighbors' features are (rows, K, D)


@dataclass(frozen=True)
class Gallery:
    """Images to search in: L2-normalized features (m, D) and the index (m,) of each in `dataset`."""

    features: Tensor
    ids: Tensor
    dataset: ImageDataset | None
    """None if the images of a queue are not available."""
    description: str
    skipped: Sequence[Skip] = ()
    note: str | None = None
    """Why `dataset` is None."""
    is_queue: bool = False
    """Whether the features are those of augmented views in a run's queue."""
    projections: Tensor | None = None
    """y2 (m, D), L2-normalized, if the search compares other features (--search-space encoder)."""

    @property
    def y2(self) -> Tensor:
        """The features (m, D) that the attention and the loss compare."""
        return self.features if self.projections is None else self.projections

    @classmethod
    def from_features(cls, features: Features, dataset: ImageDataset, projections: Tensor | None = None) -> Gallery:
        """Use the readable images of a dataset."""
        description = f"{count(len(features.ids), 'image')} of {dataset.name}"
        unit = F.normalize(features.features, dim=1)
        y2 = None if projections is None else F.normalize(projections, dim=1)
        return cls(unit, features.ids, dataset, description, features.skipped, projections=y2)

    @classmethod
    def embed(cls, session: Session, space: EmbeddingSpace, dataset: ImageDataset) -> Gallery:
        """Compute the features of a dataset's readable images."""
        features = space.features(session, dataset, space.searched, "gallery")
        return cls.from_features(features, dataset, space.projections(session, dataset))

    @classmethod
    def from_queue(cls, run: str | Path, queue: NeighborQueue | None) -> Gallery:
        """Use the run's queue, named by the images it was trained on if these are available."""
        if queue is None or len(queue) == 0:
            raise UserError(
                f"the queue of {run} is empty. Train for at least one step, or give a folder of images as --candidates"
            )
        dataset, note = training_images(run, data_of(run))
        description = f"the run's queue, {count(len(queue), 'feature')}" + ("" if note is None else f" ({note})")
        features, ids = queue.search_candidates.float().cpu(), queue.ids[: len(queue)].cpu()
        y2 = None if queue.search_features is None else queue.candidates.float().cpu()
        return cls(features, ids, dataset, description, note=note, is_queue=True, projections=y2)

    def key(self, index: int) -> str:
        """Return the key of an image, or "image INDEX" if the dataset is not available."""
        return f"image {index}" if self.dataset is None else self.dataset.key(index)

    def label(self, index: int) -> str | None:
        """Return the class name of an image, or None if unknown."""
        return None if self.dataset is None else self.dataset.class_name(index)

    def load(self, index: int) -> RGBImage:
        """Decode an image; BadImage if it is not available."""
        if self.dataset is None:
            raise BadImage("not available")
        return self.dataset.load(index)

    def index_of(self, queries: ImageDataset) -> int | None:
        """Return the index at which the gallery's dataset has the first query image, or None."""
        if self.dataset is None:
            return None
        query_ids, gallery_ids = same_images(queries, self.dataset)
        same = (gallery_ids == query_ids[0]).nonzero()
        return int(same[0, 0]) if len(same) else None

    def neighbor(self, position: int, cosine: float, w: float, label: str | None) -> Neighbor:
        """Describe row `position` of the gallery as a neighbor of a query with the given label."""
        index = int(self.ids[position])
        neighbor_label, path = self.label(index), None if self.dataset is None else self.dataset.file(index)
        same = same_class(label, neighbor_label)
        return Neighbor(self.key(index), index, cosine, w, neighbor_label, same, None if path is None else str(path))


@dataclass(frozen=True)
class Queries:
    """Query images: features (n, D) to search with (Eq. 3) and y1 (n, D) to weigh with (Eq. 4)."""

    dataset: ImageDataset
    features: Features
    y1: Tensor

    @classmethod
    def embed(cls, session: Session, space: EmbeddingSpace, dataset: ImageDataset) -> Queries:
        """Compute both features of every image's center crop."""
        searched = space.features(session, dataset, space.searched, "queries")
        if space.criterion is None:
            return cls(dataset, searched, searched.features)
        return cls(dataset, searched, space.features(session, dataset, "y1", "queries: positiveness").features)

    def take(self, rows: Tensor) -> Queries:
        """Select rows by position."""
        return Queries(self.dataset, self.features.take(rows), self.y1[rows])


@torch.no_grad()
def neighbor_rows(
    queries: Queries, gallery: Gallery, k: int, *, weigh: Weigh = weigh_by_cosine, among: int = 0, index: str = "exact"
) -> tuple[list[NeighborRow], Hits]:
    """Find the k nearest gallery images of each query by cosine (Eq. 3), ranked by w (Eq. 4).

    A query image that is itself in the gallery is never its own neighbor. Rows are shorter than k if the gallery is.
    w is computed over the `among` nearest if these are more than k; the hits then have that many columns.
    """
    ids, same = queries.features.ids, {}
    labels = [queries.dataset.class_name(query) for query in ids.tolist()]
    if gallery.dataset is not None:
        query_ids, gallery_ids = same_images(queries.dataset, gallery.dataset)
        same = {"query_ids": query_ids[ids], "gallery_ids": gallery_ids[gallery.ids]}
        # An image without a label of its own has the label of the same image in the gallery.
        gallery_index = {number: index for index, number in enumerate(gallery_ids.tolist())}
        for position, number in enumerate(query_ids[ids].tolist()):
            if labels[position] is None and number in gallery_index:
                labels[position] = gallery.dataset.class_name(gallery_index[number])
    hits = find_similar(queries.features.features, gallery.features, max(k, among), index=index, **same)
    y1, w = F.normalize(queries.y1.float(), dim=1), torch.empty_like(hits.cosine)
    for start in range(0, len(y1), _ROWS):
        block = slice(start, start + _ROWS)
        neighbors = gallery.y2[hits.index[block].clamp(min=0)]
        w[block] = weigh(y1[block], neighbors, hits.index[block] >= 0)
    rows = []
    columns = zip(ids.tolist(), labels, hits.index.tolist(), hits.cosine.tolist(), w.tolist(), strict=True)
    for query, label, positions, cosines, weights in columns:
        triples = zip(positions[:k], cosines, weights, strict=False)
        row = [gallery.neighbor(position, cosine, wi, label) for position, cosine, wi in triples if position >= 0]
        row.sort(key=lambda neighbor: -neighbor.w)
        rows.append(NeighborRow(queries.dataset.key(query), query, label, row))
    return rows, hits


def rank_as_trained(queries: Queries, gallery: Gallery, k: int, space: EmbeddingSpace) -> list[NeighborRow]:
    """Return the k nearest gallery images of each query by cosine, ranked by the w that training gives them.

    As in training, w is a softmax over the run's K neighbors, even if k is less; if k is more, over the k.
    """
    among = 0 if space.weighted_config is None else space.weighted_config.neighbors
    return neighbor_rows(queries, gallery, k, weigh=space.weigh, among=among)[0]


def same_class(one: str | None, other: str | None) -> bool | None:
    """Return whether two class names are the same; None if either is unknown."""
    return None if one is None or other is None else one == other


def neighbor_purity(rows: Sequence[NeighborRow]) -> list[float | None]:
    """Return the share of queries whose 1st, 2nd, … neighbor has their class; None if no label is known."""
    positions = itertools.zip_longest(*([neighbor.same_class for neighbor in row.neighbors] for row in rows))
    known = [[flag for flag in flags if flag is not None] for flags in positions]
    return [sum(flags) / len(flags) if flags else None for flags in known]


def measure_purity(rows: Sequence[NeighborRow], gallery: Gallery) -> tuple[list[float | None], float | None, str]:
    """Return the neighbor purity at each position, that of random neighbors (chance), and what is compared with what.

    Chance is Σ p q over the class shares p of the queries and q of the gallery: if both are the same images, the sum of
    squared class shares.
    """
    purity, text = neighbor_purity(rows), PURITY_OF_QUEUE if gallery.is_queue else PURITY_OF_CENTER_CROPS
    queries = Counter(row.label for row in rows if row.label is not None)
    images = Counter(label for label in map(gallery.label, gallery.ids.tolist()) if label is not None)
    if not queries or not images:
        return purity, None, text
    chance = sum(size * images[label] for label, size in queries.items()) / (queries.total() * images.total())
    return purity, chance, f"{text}; chance {chance:.1%}"


def training_images(run: str | Path, data: str) -> tuple[ImageDataset | None, str | None]:
    """Open the images a run was trained on; None and the reason if they are missing or have changed."""
    try:
        dataset = open_dataset(data, split="train")
    except UserError as error:
        return None, f"the run's images are not available, so neighbors are named by number: {error}"
    if _trained_fingerprint(run) not in (None, dataset.fingerprint()):
        return None, f"the images of {data} have changed since training, so neighbors are named by number"
    return dataset, None


def _trained_fingerprint(run: str | Path) -> str | None:
    """Return the dataset fingerprint in the run's newest readable checkpoint."""
    for checkpoint in sorted(RunDir(run).checkpoints.glob("step-*"), reverse=True):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return json.loads((checkpoint / "info.json").read_bytes()).get("data")
    return None
