"""Galleries, queries and neighbor rows: the one neighbor computation of neighbors, search, explain and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import BadImage, RGBImage
from snclr.data.loader import Skip
from snclr.errors import UserError
from snclr.evaluation.features import Features
from snclr.evaluation.retrieval.embeddings import Embeddings
from snclr.evaluation.retrieval.index import Hits, find_similar
from snclr.evaluation.retrieval.query_images import file_of, label_of, same_images, training_images
from snclr.evaluation.retrieval.results import Neighbor, NeighborRow
from snclr.evaluation.retrieval.space import Weigh, weigh_by_cosine
from snclr.evaluation.session import data_of
from snclr.methods.snclr.queue import NeighborQueue

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

    @classmethod
    def from_features(cls, features: Features, dataset: ImageDataset) -> Gallery:
        """Use the readable images of a dataset."""
        description = f"{len(features.ids):,} images of {dataset.name}"
        return cls(F.normalize(features.features, dim=1), features.ids, dataset, description, features.skipped)

    @classmethod
    def from_queue(cls, run: str | Path, queue: NeighborQueue | None) -> Gallery:
        """Use the run's queue, named by the images it was trained on if these are available."""
        if queue is None or len(queue) == 0:
            raise UserError(
                f"the queue of {run} is empty. Train for at least one step, or give a folder of images as --candidates"
            )
        dataset, note = training_images(run, data_of(run))
        description = f"the run's queue, {len(queue):,} features" + ("" if note is None else f" ({note})")
        features, ids = queue.candidates.float().cpu(), queue.ids[: len(queue)].cpu()
        return cls(features, ids, dataset, description, note=note)

    @classmethod
    def from_embeddings(cls, embeddings: Embeddings, dataset: ImageDataset) -> Gallery:
        """Use the features of an embeddings file, matched to the images of the dataset by key."""
        index = {dataset.key(i): i for i in range(len(dataset))}
        if not all(key in index for key in embeddings.keys):
            raise UserError(f"the embeddings name images that {dataset.name} does not have; write them again")
        ids = torch.tensor([index[key] for key in embeddings.keys])
        return cls.from_features(Features(torch.from_numpy(embeddings.features), None, ids), dataset)

    def key(self, index: int) -> str:
        """Return the key of an image, or "image INDEX" if the dataset is not available."""
        return f"image {index}" if self.dataset is None else self.dataset.key(index)

    def label(self, index: int) -> str | None:
        """Return the class name of an image, or None if unknown."""
        return None if self.dataset is None else label_of(self.dataset, index)

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
        own, path = self.label(index), None if self.dataset is None else file_of(self.dataset, index)
        same_class = None if label is None or own is None else label == own
        return Neighbor(self.key(index), index, cosine, w, own, same_class, None if path is None else str(path))


@dataclass(frozen=True)
class Queries:
    """Query images: y2 (n, D) to search with (Eq. 3) and y1 (n, D) to weigh with (Eq. 4)."""

    dataset: ImageDataset
    y2: Features
    y1: Tensor

    def take(self, rows: Tensor) -> Queries:
        """Select rows by position."""
        return Queries(self.dataset, self.y2.take(rows), self.y1[rows])


@torch.no_grad()
def neighbor_rows(
    queries: Queries, gallery: Gallery, k: int, *, weigh: Weigh = weigh_by_cosine, index: str = "exact"
) -> tuple[list[NeighborRow], Hits]:
    """Find the k nearest gallery images of each query by cosine (Eq. 3), ranked by w (Eq. 4).

    A query image that is itself in the gallery is never its own neighbor. Rows are shorter than k if the gallery is.
    """
    ids, same = queries.y2.ids, {}
    labels = [label_of(queries.dataset, query) for query in ids.tolist()]
    if gallery.dataset is not None:
        query_ids, gallery_ids = same_images(queries.dataset, gallery.dataset)
        same = {"query_ids": query_ids[ids], "gallery_ids": gallery_ids[gallery.ids]}
        # An image without a label of its own has the label of the same image in the gallery.
        index_of = {number: index for index, number in enumerate(gallery_ids.tolist())}
        for position, number in enumerate(query_ids[ids].tolist()):
            if labels[position] is None and number in index_of:
                labels[position] = label_of(gallery.dataset, index_of[number])
    hits = find_similar(queries.y2.features, gallery.features, k, index=index, **same)
    y1, w = F.normalize(queries.y1.float(), dim=1), torch.empty_like(hits.cosine)
    for start in range(0, len(y1), _ROWS):
        block = slice(start, start + _ROWS)
        neighbors = gallery.features[hits.index[block].clamp(min=0)]
        w[block] = weigh(y1[block], neighbors, hits.index[block] >= 0)
    rows = []
    columns = zip(ids.tolist(), labels, hits.index.tolist(), hits.cosine.tolist(), w.tolist(), strict=True)
    for query, label, positions, cosines, weights in columns:
        triples = zip(positions, cosines, weights, strict=True)
        row = [gallery.neighbor(position, cosine, wi, label) for position, cosine, wi in triples if position >= 0]
        row.sort(key=lambda neighbor: -neighbor.w)
        rows.append(NeighborRow(queries.dataset.key(query), query, label, row))
    return rows, hits


def same_class_share(rows: Sequence[NeighborRow]) -> list[float | None]:
    """Return, for each rank, the share of queries whose neighbor has their class; None if no label is known."""
    shares: list[float | None] = []
    for rank in range(max((len(row.neighbors) for row in rows), default=0)):
        flags = [row.neighbors[rank].same_class for row in rows if rank < len(row.neighbors)]
        known = [flag for flag in flags if flag is not None]
        shares.append(sum(known) / len(known) if known else None)
    return shares
