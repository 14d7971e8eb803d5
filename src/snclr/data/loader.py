"""Batches of views, ready to train on: the same ones for any number of workers and ranks, from any step on.

A step's crops (stage 1) are a pure function of the step, computed wherever is best: here, in a thread, or in worker
processes. The colours (stage 2) are done here, on the training device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.decode import BadImage, Picture
from snclr.data.order import REPLACEMENT, Ids, batch_ids, steps_per_epoch, uniforms
from snclr.data.patience import Stopped, until_stopped
from snclr.data.sources import ArraySource, Source, is_remote, order_of
from snclr.data.threads import threads_for
from snclr.data.views import ViewSettings, colour_views, crop_view, crop_views
from snclr.data.workers import in_processes, in_thread
from snclr.errors import UserError

# A JPEG is decoded no smaller than this many view sizes, so that even an 8 % crop is scaled down, never up.
_DRAFT_SIDES = 4
_REPLACEMENT_TRIES = 100
# Fewer bad images than this are no judgement on a large set.
_FEW_BAD = 10


@dataclass
class Batch:
    """One rank's part of a global batch: `ids` (n,), `views` float32 (n, 3, S, S) each, `labels` (n,) or None."""

    ids: Tensor
    views: tuple[Tensor, ...]
    labels: Tensor | None
    epoch: int
    step: int


@dataclass(frozen=True)
class Skip:
    """An image that could not be used, and why."""

    index: int
    key: str
    reason: str


@dataclass
class Crops:
    """Stage 1 of a step: `crops` uint8 (views, n, 3, S, S) of the images `ids`, and the bad images met on the way."""

    step: int
    epoch: int
    ids: Ids
    crops: Tensor
    bad: dict[int, str]

    def pin_memory(self) -> Crops:
        """Called by torch's DataLoader before a copy to a GPU."""
        self.crops = self.crops.pin_memory()
        return self


class ViewLoader:
    """Gives the batches of any range of training steps; `batch_size` is global, each rank gets its own rows of it.

    `views` has one ViewSettings for each view of a batch. A bad image is replaced by another, drawn from (seed, epoch,
    its id), and listed in `skipped`; more than `max_bad_share` of them stops the run.
    With `workers`, images in memory are prepared by a thread; files by that many processes.

    >>> from snclr.data import sources, views
    >>> source = sources.open_source("demo")
    >>> loader = ViewLoader(source, views=views.VIEW_GROUPS["cifar"], image_size=32, batch_size=8, seed=0)
    >>> batch = next(loader.batches(start=5, stop=6))
    >>> batch.step, batch.views[0].shape
    (5, torch.Size([8, 3, 32, 32]))
    """

    def __init__(
        self,
        source: Source,
        *,
        views: tuple[ViewSettings, ...],
        image_size: int,
        batch_size: int,
        seed: int,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        channels_last: bool = True,
        max_bad_share: float = 0.1,
    ) -> None:
        if image_size < 1 or workers < 0 or not 0 <= max_bad_share <= 1:
            raise UserError(
                f"image_size={image_size}, workers={workers}, max_bad_share={max_bad_share}: the size must be at least "
                "1, the workers at least 0, the share between 0 and 1"
            )
        if batch_size % world_size:
            raise UserError(
                f"the global batch of {batch_size} cannot be shared equally by {world_size} processes; "
                f"use a batch size that is a multiple of {world_size}"
            )
        self.steps_per_epoch = steps_per_epoch(len(source), batch_size)
        self.skipped: list[Skip] = []
        self._stage1 = CropSteps(source, views, image_size, batch_size, seed, rank, world_size)
        self._workers = workers
        self._device = torch.device(device)
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._max_bad_share = max_bad_share
        self._seen = np.zeros(len(source), dtype=np.bool_)
        self._bad: set[int] = set()
        self._shared = 0  # how many of `skipped` the other processes know of

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start, start + 1, … stop - 1. Workers live as long as this iterator.

        Where the images are behind a network, a stop (a signal that is noted, as in a run) ends the wait for a batch,
        and no more come.
        """
        # The epoch before counts as seen, so that restored bad images are not a share of the first few after a resume.
        for step in range(max(0, start - self.steps_per_epoch), start):
            self._seen[self._stage1.batch_ids(step)] = True
        if self._workers and isinstance(self._stage1.source, ArraySource):  # none of its images can be bad
            yield from in_thread(_BothStages(self._stage1, self._finish), start, stop)
            return
        try:
            for crops in self._crops(start, stop):
                self._note_bad(crops)
                hopeless = len(crops.ids) == 0
                if hopeless or (crops.bad and self._stage1.world_size == 1):  # several judge together: `share`
                    self._judge(hopeless=hopeless)
                yield self._finish(crops)
        except Stopped:
            return

    def restore_skipped(self, skips: Iterable[Skip]) -> None:
        """Put back the `skipped` of the run that is resumed: each image stays listed once."""
        self.skipped = list(skips)
        self._bad = {skip.index for skip in self.skipped}
        self._seen[list(self._bad)] = True
        self._shared = len(self.skipped)

    def unshared(self) -> list[Skip]:
        """The bad images that this process met and the others have not been told of."""
        return self.skipped[self._shared :]

    def share(self, of_all: Iterable[list[Skip]]) -> None:
        """Take the `unshared` of all processes, in rank order, so that each lists and judges the bad images of all."""
        self.skipped = self.skipped[: self._shared]
        known = {skip.index for skip in self.skipped}
        for skip in (skip for part in of_all for skip in part):
            if skip.index not in known:
                known.add(skip.index)
                self.skipped.append(skip)
        self._shared = len(self.skipped)
        self._bad = known
        self._seen[list(known)] = True
        self._judge()

    def _crops(self, start: int, stop: int) -> Iterator[Crops]:
        crops: Iterator[Crops]
        if self._workers == 0:
            crops = map(self._stage1.__getitem__, range(start, stop))
        else:
            crops = in_processes(self._stage1, start, stop, workers=self._workers, pin=self._device.type == "cuda")
        return until_stopped(crops) if is_remote(self._stage1.source) else crops

    def _finish(self, crops: Crops) -> Batch:
        """Stage 2: colours, on the device."""
        settings = self._stage1.views
        with threads_for(crops.crops[0].numel()):
            on_device = crops.crops.to(self._device, non_blocking=True)
            views = tuple(
                colour_views(
                    on_device[v], settings[v], seed=self._stage1.seed, epoch=crops.epoch, ids=crops.ids, view=v
                ).contiguous(memory_format=self._memory_format)
                for v in range(len(settings))
            )
        labels = self._stage1.source.labels
        return Batch(
            ids=torch.from_numpy(crops.ids).to(self._device),
            views=views,
            labels=None if labels is None else torch.from_numpy(labels[crops.ids]).to(self._device),
            epoch=crops.epoch,
            step=crops.step,
        )

    def _note_bad(self, crops: Crops) -> None:
        """Count what was tried (the rows of all processes, which follow from the step), and list bad images once."""
        self._seen[self._stage1.batch_ids(crops.step)] = True
        for index, reason in crops.bad.items():
            self._seen[index] = True
            if index not in self._bad:
                self._bad.add(index)
                self.skipped.append(Skip(index, self._stage1.source.key(index), reason))

    def _judge(self, *, hopeless: bool = False) -> None:
        """Stop when the bad images are too many, or when no image could be found in their place."""
        seen = int(self._seen.sum())
        if self._too_many(len(self._bad), seen) or hopeless:
            examples = "; ".join(f"{skip.key}: {skip.reason}" for skip in self.skipped[:3])
            raise UserError(
                f"{len(self._bad)} of the {seen} images of {self._stage1.source.name} tried so far cannot be used; a "
                f"share of at most {self._max_bad_share:g} is allowed. For example: {examples}. Remove or repair them, "
                "or allow a larger share."
            )

    def _too_many(self, bad: int, seen: int) -> bool:
        """Tell whether the bad images are certainly, or by all likelihood, more than the allowed share of the set."""
        share = self._max_bad_share
        likely = share * seen + 4 * math.sqrt(share * (1 - share) * seen)  # four deviations above what is allowed
        return bad > share * len(self._seen) or (bad >= _FEW_BAD and bad > likely)


@dataclass
class _BothStages(Dataset[Batch]):
    """Whole batches as a data set, for a thread to prepare while the batch before is trained on."""

    crops: CropSteps
    finish: Callable[[Crops], Batch]

    def __getitem__(self, step: int) -> Batch:
        return self.finish(self.crops[step])


@dataclass
class CropSteps(Dataset[Crops]):
    """Stage 1 as a data set whose items are whole steps, so that a worker needs to be told a step and nothing else."""

    source: Source
    views: tuple[ViewSettings, ...]
    image_size: int
    batch_size: int
    seed: int
    rank: int
    world_size: int

    def __getitem__(self, step: int) -> Crops:
        epoch, ids = self.step_ids(step)
        if isinstance(self.source, ArraySource):
            return self._from_memory(self.source, step, epoch, ids)
        return self._from_files(step, epoch, ids)

    def step_ids(self, step: int) -> tuple[int, Ids]:
        """Return a step's epoch and the ids of this rank's rows."""
        epoch, ids = batch_ids(len(self.source), self.batch_size, self.seed, step, order_of(self.source))
        share = self.batch_size // self.world_size
        return epoch, ids[self.rank * share : (self.rank + 1) * share]

    def batch_ids(self, step: int) -> Ids:
        """Return the ids of a step's whole batch, over all ranks."""
        return batch_ids(len(self.source), self.batch_size, self.seed, step, order_of(self.source))[1]

    def _from_memory(self, source: ArraySource, step: int, epoch: int, ids: Ids) -> Crops:
        images = source.images[ids]
        crops = [
            crop_views(images, settings, self.image_size, seed=self.seed, epoch=epoch, ids=ids, view=view)
            for view, settings in enumerate(self.views)
        ]
        return Crops(step, epoch, ids.copy(), torch.stack(crops), {})

    def _from_files(self, step: int, epoch: int, ids: Ids) -> Crops:
        size = self.image_size
        bad: dict[int, str] = {}
        used = np.empty_like(ids)
        crops = np.empty((len(self.views), len(ids), 3, size, size), dtype=np.uint8)
        for row, wanted in enumerate(ids.tolist()):
            found = self._load(epoch, wanted, bad)
            if found is None:  # as good as no readable image: an empty step tells the parent to stop
                return Crops(step, epoch, ids[:0].copy(), torch.from_numpy(crops[:, :0]), bad)
            used[row], picture = found
            for view, settings in enumerate(self.views):
                crop = crop_view(picture, settings, size, seed=self.seed, epoch=epoch, index=int(used[row]), view=view)
                crops[view, row] = crop.transpose(2, 0, 1)
        return Crops(step, epoch, used, torch.from_numpy(crops), bad)

    def _load(self, epoch: int, wanted: int, bad: dict[int, str]) -> tuple[int, Picture] | None:
        """Load an image, or the first good one of its stand-ins; notes the bad ones."""
        stand_ins: npt.NDArray[np.float64] | None = None
        for attempt in range(1 + _REPLACEMENT_TRIES):
            index = wanted
            if attempt:
                if stand_ins is None:
                    stand_ins = uniforms(self.seed, epoch, np.array([wanted]), REPLACEMENT, _REPLACEMENT_TRIES)[0]
                index = int(stand_ins[attempt - 1] * len(self.source))
            if index in bad:
                continue
            try:
                return index, self.source.load(index, min_side=_DRAFT_SIDES * self.image_size)
            except BadImage as error:
                bad[index] = error.reason
        return None
