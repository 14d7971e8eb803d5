"""Pictures for evaluation, chunk by chunk: decoded in worker processes, or cut from an array in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.decode import BadImage, Picture
from snclr.data.loader import Skip
from snclr.data.order import Ids
from snclr.data.sources import ArraySource, Source
from snclr.data.views import TRAIN_CROP, crop_views, eval_view, train_crop


class Request(NamedTuple):
    """Which images are wanted: the evaluation view, or a random crop of an epoch."""

    ids: Ids
    epoch: int | None = None
    ends_batch: bool = True
    """False where more chunks of the same batch follow."""


class Chunk(NamedTuple):
    """The answer to a Request: what could be read, uint8 (n, S, S, 3), and what could not."""

    ids: Ids
    pictures: Tensor
    skipped: list[Skip]
    ends_batch: bool


def chunk_requests(batches: Iterable[tuple[int | None, Ids]], chunk: int) -> Iterator[Request]:
    """Cut batches of (epoch, ids) into requests of at most `chunk` images.

    >>> [(len(r.ids), r.ends_batch) for r in chunk_requests([(0, np.arange(5))], chunk=2)]
    [(2, False), (2, False), (1, True)]
    """
    for epoch, ids in batches:
        for start in range(0, len(ids), chunk):
            yield Request(ids[start : start + chunk], epoch, ends_batch=start + chunk >= len(ids))


def read_chunks(
    source: Source, requests: Iterable[Request], *, image_size: int, seed: int = 0, workers: int = 0
) -> Iterator[Chunk]:
    """Answer the requests in their order; `workers` processes decode ahead where there are files to decode."""
    reader = _Reader(source, image_size, seed)
    if workers == 0 or isinstance(source, ArraySource):
        return map(reader.__getitem__, requests)
    # The sampler hands each request to a worker as it is; none of the loader's own batching is used.
    return iter(
        torch.utils.data.DataLoader(
            reader,  # type: ignore[arg-type]
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
        )
    )


@dataclass
class _Reader:
    """Indexed by requests, as a DataLoader wants it; sent to the workers, so it holds its settings alone."""

    source: Source
    size: int
    seed: int

    def __getitem__(self, request: Request) -> Chunk:
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
        return train_crop(picture, self.size, seed=self.seed, epoch=request.epoch, index=index)

    def _from_array(self, images: Picture, request: Request) -> Tensor:
        chosen: Picture = images[request.ids]
        if request.epoch is not None:
            cut = crop_views(
                chosen, TRAIN_CROP, self.size, seed=self.seed, epoch=request.epoch, ids=request.ids, view=0
            )
            return cut.permute(0, 2, 3, 1)
        if chosen.shape[1] == chosen.shape[2] == self.size:
            return torch.from_numpy(chosen)
        return torch.from_numpy(np.stack([eval_view(picture, self.size) for picture in chosen]))


def _as_it_is(chunk: Any) -> Any:
    return chunk
