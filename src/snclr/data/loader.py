"""The training dataloader: batches of views that do not depend on the number of workers or ranks.

It can start at any step: crops (stage 1) are a pure function of the step and are computed in this process, a thread, or
worker processes. Color transforms (stage 2) run on the training device. A plain DataLoader cannot start at any step,
nor replace bad images.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.datasets.base import ArrayDataset, ImageDataset
from snclr.data.decode import BadImage, RGBImage
from snclr.data.image_cache import ImageCache
from snclr.data.sampler import Ids, ViewKey, batch_ids, steps_per_epoch, with_replacements
from snclr.data.transforms.views import ViewSettings, color_views, crop_views
from snclr.data.workers import copy_ahead, in_thread, read_items
from snclr.errors import UserError
from snclr.runtime.device import threads_for, to_device
from snclr.runtime.stop import StopRequested, until_stopped

# JPEGs may be decoded at reduced size, but at least this many times the view size: an 8 % crop is not upscaled.
_DRAFT_SIDES = 4
_REPLACEMENT_TRIES = 100
# Decoded images are collected up to this size, then cropped in one call.
_CROP_GROUP_BYTES = 8 * 10**6
# With fewer bad images, their share is not estimated from the images read so far.
_MIN_BAD_FOR_ESTIMATE = 10


@dataclass
class Batch:
    """One rank's part of a global batch: `ids` (n,), `views` float32 (n, 3, S, S) each, `labels` (n,) or None.

    The side S may differ between views.
    """

    ids: Tensor
    views: tuple[Tensor, ...]
    labels: Tensor | None
    epoch: int
    step: int


@dataclass(frozen=True)
class Skip:
    """A bad image and the reason."""

    index: int
    key: str
    reason: str


@dataclass
class CroppedBatch:
    """Stage 1 of a step: `crops` uint8 (n, 3, S, S) of the images `ids`, one per view; the reasons of bad images."""

    step: int
    epoch: int
    ids: Ids
    crops: list[Tensor]
    bad: dict[int, str]

    def pin_memory(self) -> "CroppedBatch":
        """Pin the memory; called by DataLoader."""
        self.crops = [crops.pin_memory() for crops in self.crops]
        return self


@dataclass(eq=False)
class ViewLoader:
    """Load the batches of any range of training steps. `batch_size` is global; each rank gets its rows of it.

    `views` has one ViewSettings per view, `sizes` the side of each (default: `image_size` for all). A bad image is
    replaced by one drawn from (seed, epoch, its id) and listed in `skipped`; more than `max_bad_share` of them is an
    error. With `workers`, images in memory are prepared by a thread, files by that many processes. A dataset of files
    of at most `cache_bytes` when decoded is decoded once.

    >>> from snclr.data.datasets import base
    >>> from snclr.data.transforms import views
    >>> dataset = base.open_dataset("demo")
    >>> loader = ViewLoader(dataset, views=views.VIEW_GROUPS["cifar"], image_size=32, batch_size=8, seed=0)
    >>> batch = next(loader.batches(start=5, stop=6))
    >>> batch.step, batch.views[0].shape
    (5, torch.Size([8, 3, 32, 32]))
    """

    dataset: ImageDataset
    _: KW_ONLY
    views: tuple[ViewSettings, ...]
    image_size: int
    sizes: Sequence[int] | None = None
    batch_size: int
    seed: int
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    max_bad_share: float = 0.1
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self.steps_per_epoch = steps_per_epoch(len(self.dataset), self.batch_size)
        self.in_memory = isinstance(self.dataset, ArrayDataset)
        cache = ImageCache(len(self.dataset), self.cache_bytes) if self.cache_bytes and not self.in_memory else None
        self.crop_steps = CropSteps(
            self.dataset, self.views, tuple(self.sizes or [self.image_size] * len(self.views)), self.batch_size,
            self.seed, self.rank, self.world_size, cache,
        )  # fmt: skip
        self._seen = np.zeros(len(self.dataset), dtype=np.bool_)
        self._skips: dict[int, Skip] = {}  # by index, in the order of `skipped`
        self._merged = 0  # number of skips that all ranks have

    @property
    def skipped(self) -> list[Skip]:
        """The bad images so far."""
        return list(self._skips.values())

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start … stop - 1. Workers end with this iterator.

        With remote images, a stop signal interrupts the wait for a batch and ends the iterator.
        """
        # The previous epoch counts as seen; otherwise restored bad images would be a large share after a resume.
        for step in range(max(0, start - self.steps_per_epoch), start):
            self._seen[self.crop_steps.global_batch(step)[1]] = True
        device = torch.device(self.device)
        on_gpu = device.type == "cuda"
        if self.workers and self.in_memory and not on_gpu:  # has no bad images
            yield from in_thread(lambda step: self.finish(self.crop_steps[step]), start, stop)
            return
        steps = read_items(self.crop_steps, start, stop, workers=self.workers, in_memory=self.in_memory, pin=on_gpu)
        steps = until_stopped(steps) if self.dataset.remote else steps
        try:
            for cropped in copy_ahead(steps, device, lambda s: s.crops, lambda s, parts: replace(s, crops=parts)):
                self._seen[self.crop_steps.global_batch(cropped.step)[1]] = True  # the images of all ranks
                for index, reason in cropped.bad.items():
                    self._seen[index] = True
                    self._skips.setdefault(index, Skip(index, self.dataset.key(index), reason))
                no_replacement = len(cropped.ids) == 0
                if no_replacement or (cropped.bad and self.world_size == 1):  # ranks check in `merge_skips`
                    self._check_bad_share(no_replacement=no_replacement)
                yield self.finish(cropped)
        except StopRequested:
            return

    def restore_skipped(self, skips: Iterable[Skip]) -> None:
        """Restore `skipped` of a resumed run."""
        self._skips = {skip.index: skip for skip in skips}
        self._seen[list(self._skips)] = True
        self._merged = len(self._skips)

    def new_skips(self) -> list[Skip]:
        """Return the bad images found by this rank since the last `merge_skips`."""
        return self.skipped[self._merged :]

    def merge_skips(self, parts: Iterable[list[Skip]]) -> None:
        """Add the `new_skips` of all ranks, in rank order, and check the share of bad images."""
        merged = {skip.index: skip for skip in self.skipped[: self._merged]}
        for skip in itertools.chain.from_iterable(parts):
            merged.setdefault(skip.index, skip)
        self.restore_skipped(merged.values())
        self._check_bad_share()

    def finish(self, cropped: CroppedBatch) -> Batch:
        """Apply stage 2 on the device."""
        views = []
        with threads_for(cropped.crops[0].numel()):
            for view, (part, settings) in enumerate(zip(cropped.crops, self.views, strict=True)):
                key = ViewKey(self.seed, cropped.epoch, cropped.ids, view)
                views.append(color_views(to_device(part, self.device), settings, key, torch.channels_last))
        ids = to_device(torch.from_numpy(cropped.ids), self.device)
        labels = self.dataset.labels
        known = None if labels is None else to_device(torch.from_numpy(labels[cropped.ids]), self.device)
        return Batch(ids, tuple(views), known, cropped.epoch, cropped.step)

    def _check_bad_share(self, *, no_replacement: bool = False) -> None:
        """Raise UserError if no replacement was found, or too many images are bad.

        Too many are more than `max_bad_share` of the whole dataset, or, among the images seen so far, more than four
        standard deviations above that share.
        """
        seen, bad, share = int(self._seen.sum()), len(self._skips), self.max_bad_share
        likely = share * seen + 4 * math.sqrt(share * (1 - share) * seen)
        if no_replacement or bad > share * len(self._seen) or (bad >= _MIN_BAD_FOR_ESTIMATE and bad > likely):
            examples = "; ".join(f"{skip.key}: {skip.reason}" for skip in self.skipped[:3])
            raise UserError(
                f"{bad} of the {seen} images of {self.dataset.name} read so far are bad; a share of at most "
                f"{share:g} is allowed. For example: {examples}. Remove or repair them, or raise"
                " --max-bad-share."
            )


@dataclass
class CropSteps(Dataset[CroppedBatch]):
    """A dataset whose item i is stage 1 of step i: a worker needs only the step number."""

    dataset: ImageDataset
    views: tuple[ViewSettings, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seed: int
    rank: int
    world_size: int
    cache: ImageCache | None = None

    def __getitem__(self, step: int) -> CroppedBatch:
        epoch, ids = self.global_batch(step)
        local_batch_size = self.batch_size // self.world_size
        ids = ids[self.rank * local_batch_size : (self.rank + 1) * local_batch_size]
        if not isinstance(self.dataset, ArrayDataset):
            return self._from_files(step, epoch, ids)
        return CroppedBatch(step, epoch, ids.copy(), self._crop(self.dataset.images[ids], epoch, ids), {})

    def global_batch(self, step: int) -> tuple[int, Ids]:
        """Return the epoch of a step and the ids of all ranks' images."""
        return batch_ids(len(self.dataset), self.batch_size, self.seed, step, self.dataset.epoch_order)

    def _from_files(self, step: int, epoch: int, ids: Ids) -> CroppedBatch:
        bad: dict[int, str] = {}
        used = np.empty_like(ids)
        crops = [torch.empty((len(ids), 3, size, size), dtype=torch.uint8) for size in self.sizes]
        group: list[RGBImage] = []
        group_bytes = 0
        for row, index in enumerate(ids.tolist()):
            found = self._load(epoch, index, bad)
            if found is None:  # an empty step is an error in the parent
                return CroppedBatch(step, epoch, ids[:0].copy(), [part[:0] for part in crops], bad)
            used[row], image = found
            group.append(image)
            group_bytes += image.nbytes
            if group_bytes >= _CROP_GROUP_BYTES or row + 1 == len(ids):
                rows = slice(row + 1 - len(group), row + 1)
                for whole, part in zip(crops, self._crop(group, epoch, used[rows]), strict=True):
                    whole[rows] = part
                group, group_bytes = [], 0
        return CroppedBatch(step, epoch, used, crops, bad)

    def _crop(self, images: RGBImage | list[RGBImage], epoch: int, ids: Ids) -> list[Tensor]:
        """Return the crops of the images `ids`, one tensor per view."""
        return [
            crop_views(images, settings, size, ViewKey(self.seed, epoch, ids, view))
            for view, (settings, size) in enumerate(zip(self.views, self.sizes, strict=True))
        ]

    def _load(self, epoch: int, index: int, bad: dict[int, str]) -> tuple[int, RGBImage] | None:
        """Return the image of this index, or the first readable replacement, with its index; add bad ones to `bad`."""
        for candidate in with_replacements(index, len(self.dataset), self.seed, epoch, tries=_REPLACEMENT_TRIES):
            if candidate not in bad:
                try:
                    return candidate, self._decoded(candidate)
                except BadImage as error:
                    bad[candidate] = str(error)
        return None

    def _decoded(self, index: int) -> RGBImage:
        """Return an image from the cache, or load it and add it."""
        image = None if self.cache is None else self.cache.get(index)
        if image is None:
            image = self.dataset.load(index, min_side=_DRAFT_SIDES * max(self.sizes))
            if self.cache is not None:
                self.cache.add(index, image)
        return image
