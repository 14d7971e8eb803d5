"""Pictures for evaluation, chunk by chunk: decoded in worker processes, or cut from an array in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.decode import BadImage, Picture
from snclr.data.loader import Skip
from snclr.data.order import Ids, epoch_order
from snclr.data.sources import ArraySource, Source
from snclr.data.views import TRAIN_CROP, crop_views, eval_view, train_crop
from snclr.data.workers import in_processes, in_thread


class Request(NamedTuple):
    """Which images are wanted: the evaluation view (epoch None), or an epoch's random crops."""

    ids: Ids
    epoch: int | None
    ends_batch: bool
    """False where more chunks of the same batch follow."""


@dataclass(frozen=True)
class Plan:
    """Batches of images, cut into numbered chunks: what a network takes at once may be less than a batch.

    Without `epochs`, all `ids` once, in their order, as evaluation views; with them, as often, shuffled by the seed, as
    random crops. The last batch of an epoch may be smaller.

    >>> plan = Plan(np.arange(5), batch=3, chunk=2)
    >>> [(request.ids.tolist(), request.ends_batch) for request in map(plan.request, range(len(plan)))]
    [([0, 1], False), ([2], True), ([3, 4], True)]
    """

    ids: Ids
    batch: int
    chunk: int
    epochs: int | None = None
    seed: int = 0

    @property
    def steps(self) -> int:
        """How many batches there are in all."""
        return -(-len(self.ids) // self.batch) * (self.epochs or 1)

    def __len__(self) -> int:
        return self._chunks_an_epoch * (self.epochs or 1)

    def request(self, number: int) -> Request:
        """The images of one chunk."""
        epoch, number = divmod(number, self._chunks_an_epoch)
        batch, part = divmod(number, -(-self.batch // self.chunk))
        end = min((batch + 1) * self.batch, len(self.ids))
        start = batch * self.batch + part * self.chunk
        stop = min(start + self.chunk, end)
        if self.epochs is None:
            return Request(self.ids[start:stop], None, stop == end)
        order = _order(len(self.ids), self.seed, epoch)
        return Request(self.ids[order[start:stop]], epoch, stop == end)

    @property
    def _chunks_an_epoch(self) -> int:
        whole, rest = divmod(len(self.ids), self.batch)
        return whole * -(-self.batch // self.chunk) + -(-rest // self.chunk)


@functools.lru_cache(maxsize=2)  # asked for again at every chunk of an epoch
def _order(length: int, seed: int, epoch: int) -> Ids:
    return epoch_order(length, seed, epoch)


class Chunk(NamedTuple):
    """The answer to a Request: what could be read, uint8 (n, S, S, 3), and what could not."""

    ids: Ids
    pictures: Tensor
    skipped: list[Skip]
    ends_batch: bool


def read_chunks(source: Source, plan: Plan, *, image_size: int, workers: int = 0) -> Iterator[Chunk]:
    """All chunks of a plan, in order; `workers` processes decode files ahead (one thread, where there are none)."""
    reader = _Reader(source, plan, image_size)
    if workers == 0:
        return map(reader.__getitem__, range(len(plan)))
    if isinstance(source, ArraySource):
        return in_thread(reader, 0, len(plan))
    return in_processes(reader, 0, len(plan), workers=workers)


@dataclass
class _Reader(Dataset[Chunk]):
    """Chunks by number; sent to the workers, so it holds its settings alone."""

    source: Source
    plan: Plan
    size: int

    def __getitem__(self, number: int) -> Chunk:
        request = self.plan.request(number)
        if isinstance(self.source, ArraySource):
            return Chunk(request.ids, self._from_array(self.source.images, request), [], request.ends_batch)
        kept: list[int] = []
        pictures: list[Picture] = []
        skipped: list[Skip] = []
        for index in request.ids.tolist():
            try:
                pictures.append(self._view(self.source.load(index, min_side=self._min_side(request)), index, request))
                kept.append(index)
            except BadImage as error:
                skipped.append(Skip(index, self.source.key(index), error.reason))
        stacked = np.stack(pictures) if pictures else np.empty((0, self.size, self.size, 3), np.uint8)
        return Chunk(np.array(kept, dtype=np.int64), torch.from_numpy(stacked), skipped, request.ends_batch)

    def _min_side(self, request: Request) -> int:
        # A centre crop shows most of the picture, a random one perhaps 8 % of its area: neither is to be scaled up.
        return self.size * (2 if request.epoch is None else 4)

    def _view(self, picture: Picture, index: int, request: Request) -> Picture:
        if request.epoch is None:
            return eval_view(picture, self.size)
        return train_crop(picture, self.size, seed=self.plan.seed, epoch=request.epoch, index=index)

    def _from_array(self, images: Picture, request: Request) -> Tensor:
        chosen: Picture = images[request.ids]
        if request.epoch is not None:
            cut = crop_views(
                chosen, TRAIN_CROP, self.size, seed=self.plan.seed, epoch=request.epoch, ids=request.ids, view=0
            )
            return cut.permute(0, 2, 3, 1)
        if chosen.shape[1] == chosen.shape[2] == self.size:
            return torch.from_numpy(chosen)
        return torch.from_numpy(np.stack([eval_view(picture, self.size) for picture in chosen]))
