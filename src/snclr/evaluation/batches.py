"""Images for evaluation in chunks, decoded in worker processes or cropped from an array in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.datasets.base import ArrayDataset, ImageDataset
from snclr.data.decode import BadImage, RGBImage
from snclr.data.loader import Skip
from snclr.data.sampler import Ids, cached_epoch_order
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import TRAIN_CROP, crop_view, crop_views
from snclr.data.workers import read_items


class Request(NamedTuple):
    """Images to read, as evaluation views (epoch None) or as the random crops of an epoch."""

    ids: Ids
    epoch: int | None
    ends_batch: bool
    """False if more chunks of the same batch follow."""


@dataclass
class BatchPlan:
    """Batches of images in numbered chunks; a chunk is what the network encodes at once.

    Without `epochs`, all `ids` once, in order, as evaluation views; with `epochs`, shuffled by the seed, as random
    crops. The last batch of an epoch may be smaller. Each rank has its share of a batch's chunks; the chunks themselves
    do not depend on the world size. A chunk is empty if a batch has fewer chunks than ranks.

    >>> plan = BatchPlan(np.arange(5), batch=3, chunk=2)
    >>> [(request.ids.tolist(), request.ends_batch) for request in map(plan.request, range(len(plan)))]
    [([0, 1], False), ([2], True), ([3, 4], True)]
    >>> plan = BatchPlan(np.arange(5), batch=3, chunk=2, rank=1, world_size=2)
    >>> [(request.ids.tolist(), request.ends_batch) for request in map(plan.request, range(len(plan)))]
    [([2], True), ([], True)]
    """

    ids: Ids
    batch: int
    chunk: int
    epochs: int | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self._chunks: list[tuple[int, int, bool]] = []  # start, stop and `ends_batch` of an epoch's chunks of this rank
        self._first_chunks: list[int] = []  # of each batch
        for start in range(0, len(self.ids), self.batch):
            end = min(start + self.batch, len(self.ids))
            count = -(-(end - start) // (self.chunk * self.world_size))
            self._first_chunks.append(len(self._chunks))
            for number in range(count):
                first = min(start + (self.rank * count + number) * self.chunk, end)
                self._chunks.append((first, min(first + self.chunk, end), number + 1 == count))
        self.steps_per_epoch = len(self._first_chunks)
        self.steps = self.steps_per_epoch * (self.epochs or 1)

    def __len__(self) -> int:
        return len(self._chunks) * (self.epochs or 1)

    def first_request(self, step: int) -> int:
        """Return the number of the first request after `step` batches."""
        if step == self.steps:
            return len(self)
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch * len(self._chunks) + self._first_chunks[batch]

    def request(self, number: int) -> Request:
        """Return the images of one chunk."""
        epoch, number = divmod(number, len(self._chunks))
        start, stop, last = self._chunks[number]
        if self.epochs is None:
            return Request(self.ids[start:stop], None, last)
        return Request(self.ids[cached_epoch_order(len(self.ids), self.seed, epoch)[start:stop]], epoch, last)


class Chunk(NamedTuple):
    """The readable images of a request, uint8 (n, S, S, 3), and the skipped ones."""

    ids: Ids
    images: Tensor
    skipped: list[Skip]
    ends_batch: bool


def read_chunks(
    dataset: ImageDataset, plan: BatchPlan, *, image_size: int, workers: int = 0, start: int = 0, pin: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks of a plan from batch `start`; `workers` processes (for arrays one thread) read ahead.

    `pin` copies the chunks of worker processes to pinned memory.
    """
    reader = _Reader(dataset, plan, image_size)
    first = plan.first_request(start)
    in_memory = isinstance(dataset, ArrayDataset)
    return read_items(reader, first, len(plan), workers=workers, in_memory=in_memory, pin=pin)


@dataclass
class _Reader(Dataset[Chunk]):
    """Chunks by number; pickled to the workers."""

    dataset: ImageDataset
    plan: BatchPlan
    size: int

    def __getitem__(self, number: int) -> Chunk:
        ids, epoch, ends_batch = self.plan.request(number)
        if isinstance(self.dataset, ArrayDataset) and epoch is not None and len(ids):
            options = {"seed": self.plan.seed, "epoch": epoch, "view": 0}
            views = crop_views(self.dataset.images[ids], TRAIN_CROP, self.size, ids=ids, **options)
            return Chunk(ids, views.permute(0, 2, 3, 1), [], ends_batch)
        kept: list[int] = []
        images: list[RGBImage] = []
        skipped: list[Skip] = []
        for index in ids.tolist():
            try:
                images.append(self._view(index, epoch))
                kept.append(index)
            except BadImage as error:
                skipped.append(Skip(index, self.dataset.key(index), error.reason))
        stacked = np.stack(images) if images else np.empty((0, self.size, self.size, 3), np.uint8)
        return Chunk(np.array(kept, dtype=np.int64), torch.from_numpy(stacked), skipped, ends_batch)

    def _view(self, index: int, epoch: int | None) -> RGBImage:
        # Decode large enough that neither a center crop nor a random crop of 8 % of the area is upsampled.
        image = self.dataset.load(index, min_side=self.size * (2 if epoch is None else 4))
        if epoch is None:
            return center_crop(image, self.size)
        return crop_view(image, TRAIN_CROP, self.size, seed=self.plan.seed, epoch=epoch, index=index, view=0)
