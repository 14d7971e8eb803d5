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
    random crops. The last batch of an epoch may be smaller. Where processes share the work, `part` (rank, processes)
    asks for its chunks of every batch alone: the chunks themselves are the same for any number of processes.

    >>> plan = Plan(np.arange(5), batch=3, chunk=2)
    >>> [(request.ids.tolist(), request.ends_batch) for request in map(plan.request, range(len(plan)))]
    [([0, 1], False), ([2], True), ([3, 4], True)]
    >>> plan = Plan(np.arange(5), batch=3, chunk=2, part=(1, 2))
    >>> [(request.ids.tolist(), request.ends_batch) for request in map(plan.request, range(len(plan)))]
    [([2], True), ([], True)]
    """

    ids: Ids
    batch: int
    chunk: int
    epochs: int | None = None
    seed: int = 0
    part: tuple[int, int] = (0, 1)

    @property
    def steps(self) -> int:
        """How many batches there are in all."""
        return self._steps_an_epoch * (self.epochs or 1)

    def __len__(self) -> int:
        return self.first_request(self.steps)

    def first_request(self, step: int) -> int:
        """The number of the first request of a batch: where to go on after `step` of them."""
        whole, rest = divmod(len(self.ids), self.batch)
        epoch, batch = divmod(step, self._steps_an_epoch) if len(self.ids) else (0, 0)
        return epoch * (whole * self._requests(self.batch) + self._requests(rest)) + batch * self._requests(self.batch)

    def request(self, number: int) -> Request:
        """The images of one chunk; none where the others of its batch leave nothing for this process."""
        epoch, number = divmod(number, self.first_request(self._steps_an_epoch))
        batch, place = divmod(number, self._requests(self.batch))
        end = min((batch + 1) * self.batch, len(self.ids))
        requests = self._requests(end - batch * self.batch)
        start = min(batch * self.batch + (self.part[0] * requests + place) * self.chunk, end)
        stop, last = min(start + self.chunk, end), place == requests - 1
        if self.epochs is None:
            return Request(self.ids[start:stop], None, last)
        order = _order(len(self.ids), self.seed, epoch)
        return Request(self.ids[order[start:stop]], epoch, last)

    @property
    def _steps_an_epoch(self) -> int:
        return -(-len(self.ids) // self.batch)

    def _requests(self, images: int) -> int:
        """How many chunks of a batch of so many images fall to each process, at most."""
        chunks = -(-images // self.chunk)
        return -(-chunks // self.part[1])


@functools.lru_cache(maxsize=2)  # asked for again at every chunk of an epoch
def _order(length: int, seed: int, epoch: int) -> Ids:
    return epoch_order(length, seed, epoch)


class Chunk(NamedTuple):
    """The answer to a Request: what could be read, uint8 (n, S, S, 3), and what could not."""

    ids: Ids
    pictures: Tensor
    skipped: list[Skip]
    ends_batch: bool


def read_chunks(source: Source, plan: Plan, *, image_size: int, workers: int = 0, start: int = 0) -> Iterator[Chunk]:
    """The chunks of a plan from batch `start` on; `workers` processes decode files ahead (a thread, for arrays)."""
    reader = _Reader(source, plan, image_size)
    first = plan.first_request(start)
    if workers == 0 or first == len(plan):  # no workers for nothing
        return map(reader.__getitem__, range(first, len(plan)))
    if isinstance(source, ArraySource):
        return in_thread(reader, first, len(plan))
    return in_processes(reader, first, len(plan), workers=workers)


@dataclass
class _Reader(Dataset[Chunk]):
    """Chunks by number; sent to the workers, so it holds its settings alone."""

    source: Source
    plan: Plan
    size: int

    def __getitem__(self, number: int) -> Chunk:
        request = self.plan.request(number)
        if isinstance(self.source, ArraySource) and len(request.ids):
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
