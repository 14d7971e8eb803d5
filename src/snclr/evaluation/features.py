"""Feature extraction: the features of every image of a dataset by a frozen encoder.

Images are read in chunks, decoded in worker processes or cropped from an array in memory.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from snclr.data.datasets.base import ArrayDataset, ImageDataset, Labels
from snclr.data.decode import BadImage
from snclr.data.loader import Skip
from snclr.data.sampler import Ids, ViewKey, epoch_order
from snclr.data.transforms.views import PLAIN_VIEW, TRAIN_CROP, crop_views, normalize
from snclr.data.workers import copy_ahead, read_items
from snclr.distributed.collectives import all_gather_objects, all_gather_rows, raise_on_all_ranks, rank_and_size
from snclr.errors import UserError, count
from snclr.evaluation.state import EncodedBatch, FeatureStore, raise_if_stop_requested
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag, StopRequested, until_stopped

BLOCK = 1024
"""Images per cached file: the most work that a stop in the middle of an extraction costs."""


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
        for start in range(0, len(self.ids), self.batch):
            end = min(start + self.batch, len(self.ids))
            per_rank = -(-(end - start) // (self.chunk * self.world_size))
            for number in range(per_rank):
                first = min(start + (self.rank * per_rank + number) * self.chunk, end)
                self._chunks.append((first, min(first + self.chunk, end), number + 1 == per_rank))
        self.steps_per_epoch = -(-len(self.ids) // self.batch)
        self.steps = self.steps_per_epoch * (self.epochs or 1)

    def __len__(self) -> int:
        return len(self._chunks) * (self.epochs or 1)

    def first_request(self, step: int) -> int:
        """Return the number of the first request after `step` batches."""
        epoch, batch = divmod(step, max(1, self.steps_per_epoch))
        return epoch * len(self._chunks) + batch * -(-self.batch // (self.chunk * self.world_size))

    def request(self, number: int) -> Request:
        """Return the images of one chunk."""
        epoch, number = divmod(number, len(self._chunks))
        start, stop, last = self._chunks[number]
        if self.epochs is None:
            return Request(self.ids[start:stop], None, last)
        return Request(self.ids[epoch_order(len(self.ids), self.seed, epoch)[start:stop]], epoch, last)


class Chunk(NamedTuple):
    """The readable images of a request, uint8 (n, S, S, 3), and the skipped ones."""

    ids: Ids
    images: Tensor
    skipped: list[Skip]
    ends_batch: bool


@dataclass
class Chunks(Dataset[Chunk]):
    """Chunks of a plan by number, with images of side `size`; pickled to the workers."""

    dataset: ImageDataset
    plan: BatchPlan
    size: int

    def __getitem__(self, number: int) -> Chunk:
        ids, epoch, ends_batch = self.plan.request(number)
        settings = PLAIN_VIEW if epoch is None else TRAIN_CROP
        key = ViewKey(self.plan.seed, epoch or 0, ids, view=0)
        if isinstance(self.dataset, ArrayDataset) and len(ids):
            views = crop_views(self.dataset.images[ids], settings, self.size, key)
            return Chunk(ids, views.permute(0, 2, 3, 1), [], ends_batch)
        # Decode large enough that neither a center crop nor a random crop of 8 % of the area is upsampled.
        min_side = self.size * (2 if epoch is None else 4)
        kept: list[int] = []
        images = [torch.empty((0, 3, self.size, self.size), dtype=torch.uint8)]
        skipped: list[Skip] = []
        for index in ids.tolist():
            try:
                image = self.dataset.load(index, min_side=min_side)
                images.append(crop_views([image], settings, self.size, key._replace(ids=np.array([index]))))
                kept.append(index)
            except BadImage as error:
                skipped.append(Skip(index, self.dataset.key(index), str(error)))
        return Chunk(np.array(kept, dtype=np.int64), torch.cat(images).permute(0, 2, 3, 1), skipped, ends_batch)


@dataclass(frozen=True)
class Features:
    """Features of the readable images, in the order of their ids (indices in the dataset)."""

    features: Tensor
    """(n, d) float32, on the CPU."""
    labels: Tensor | None
    """(n,) int64, -1 if unknown; None for a dataset without labels."""
    ids: Tensor
    """(n,) int64."""
    skipped: list[Skip] = field(default_factory=list)
    """The images that could not be read."""

    def take(self, rows: Tensor) -> "Features":
        """Select rows by position."""
        labels = None if self.labels is None else self.labels[rows]
        return Features(self.features[rows], labels, self.ids[rows], self.skipped)


def extract_features(
    encoder: nn.Module, dataset: ImageDataset, *, image_size: int, batch_size: int = 128, workers: int = 0,
    device: torch.device | str = "cpu", labels: Labels | None = None, description: str = "features",
    store: FeatureStore | None = None, stop: StopFlag | None = None, quiet: bool = False, precision: str = "32",
) -> Features:  # fmt: skip
    """Extract the features of every image's center crop with the encoder, which is set to evaluation mode, on `device`.

    Unreadable images are skipped and listed. `labels` (one per image) replaces those of the dataset: see
    `match_labels`. The ranks share the images, and each receives all features. A `store` supplies cached blocks and
    receives new ones; `stop` ends the extraction with StopRequested. `precision` is that of the encoder, "32" or
    "bf16".
    """
    if batch_size < 1 or workers < 0:
        raise UserError(f"batch_size is {batch_size} and workers {workers}; give at least 1 and 0")
    if len(dataset) == 0:
        raise UserError(f"{dataset.name} has no images; give a dataset that has some")
    rank, world_size = rank_and_size()
    blocks = [np.arange(n, min(n + BLOCK, len(dataset)), dtype=np.int64) for n in range(0, len(dataset), BLOCK)]
    with Progress(description, total=len(dataset), quiet=quiet or rank > 0) as progress:
        read = {} if store is None else {n: b for n, ids in enumerate(blocks) if (b := store.read(n, ids)) is not None}
        encoded = {number: read[number] for number in set.intersection(*all_gather_objects(set(read)))}  # on every rank
        missing = [number for number in range(len(blocks)) if number not in encoded]
        progress.done = sum(len(blocks[number]) for number in encoded)
        if store is not None and progress.done:
            done = f"{progress.done:,} of {count(len(dataset), 'image')}"
            progress.print(f"{progress.description}: {done} read from the cache\n  {store.parent}")
        # The size of a chunk must not depend on the world size, since the images of a chunk determine the last bits
        # of their features. A small dataset has small chunks, so that all ranks get a share.
        chunk = min(batch_size, max(32, -(-len(dataset) // 8)))
        ids = np.concatenate([np.empty(0, np.int64), *(blocks[number] for number in missing)])
        plan = BatchPlan(ids, batch=BLOCK, chunk=chunk, rank=rank, world_size=world_size)
        batches = encode_batches(
            encoder, dataset, plan, image_size=image_size, workers=workers, device=device, progress=progress, stop=stop,
            precision=precision,
        )  # fmt: skip
        for number, batch in zip(missing, batches, strict=True):
            encoded[number] = block = batch._replace(features=batch.features.cpu())
            if store is not None and rank == 0:
                store.write(number, blocks[number], block, progress.print)
    return _concatenate(dataset, encoded, labels)


def _concatenate(dataset: ImageDataset, blocks: dict[int, EncodedBatch], labels: Labels | None) -> Features:
    """Join the blocks in the order of their numbers; each is freed when copied, as they may fill most of the memory."""
    ids = np.concatenate([blocks[number].ids for number in sorted(blocks)])
    skipped = sorted((skip for block in blocks.values() for skip in block.skipped), key=lambda skip: skip.index)
    if len(ids) == 0:
        raise UserError(
            f"no image of {dataset.name} could be read ({len(dataset)} tried); the first, {skipped[0].key}: "
            f"{skipped[0].reason}"
        )
    features = torch.empty(len(ids), max(block.features.shape[1] for block in blocks.values()))
    start = 0
    for number in sorted(blocks):
        block = blocks.pop(number)
        if len(block.ids):  # without a readable image, the width is unknown
            features[start : start + len(block.ids)] = block.features
        start += len(block.ids)
    labels = dataset.labels if labels is None else labels
    known = None if labels is None else torch.from_numpy(labels[ids])
    return Features(features, known, torch.from_numpy(ids), skipped)


def encode_batches(
    encoder: nn.Module, dataset: ImageDataset, plan: BatchPlan, *, image_size: int, workers: int,
    device: torch.device | str, progress: Progress, start: int = 0, stop: StopFlag | None = None,
    precision: str = "32",
) -> Iterator[EncodedBatch]:  # fmt: skip
    """Encode the batches of a plan from `start`; each rank encodes its chunks and yields the whole batch on `device`.

    The encoder is set to evaluation mode. A stop discards the current batch and raises StopRequested. It and the errors
    of any rank are raised on all ranks.
    """
    device = torch.device(device)
    encoder.to(device).eval()
    chunks = read_items(
        Chunks(dataset, plan, image_size), plan.first_request(start), len(plan), workers=workers,
        in_memory=isinstance(dataset, ArrayDataset), pin=device.type == "cuda",
    )  # fmt: skip
    if stop is not None and dataset.remote:
        chunks = until_stopped(chunks)
    chunks = copy_ahead(chunks, device, lambda chunk: [chunk.images], lambda chunk, new: chunk._replace(images=new[0]))
    for _ in range(start, plan.steps):
        ids, features = [torch.empty(0, dtype=torch.int64)], []
        skipped: list[Skip] = []
        counted, clock = 0, time.monotonic()
        # StopRequested comes from a remote dataset; `stop` is set as well.
        with raise_on_all_ranks(), contextlib.suppress(StopRequested):
            for chunk in chunks:
                waited = time.monotonic() - clock
                skipped += chunk.skipped
                if len(chunk.ids):
                    ids.append(torch.as_tensor(chunk.ids))  # a worker sends a tensor
                    features.append(_forward(encoder, chunk.images, device, precision))
                # An estimate for all ranks, corrected when the batch is complete.
                images = (len(chunk.ids) + len(chunk.skipped)) * plan.world_size
                counted += images
                progress.update(images, waited, time.monotonic() - clock - waited)
                if chunk.ends_batch or (stop is not None and stop.requested is not None):
                    break
                clock = time.monotonic()
        raise_if_stop_requested(stop)
        parts = all_gather_objects((features[0].shape[1] if features else 0, skipped))
        width = max(columns for columns, _ in parts)
        rows = all_gather_rows(torch.cat([torch.empty(0, width, device=device), *features]))
        all_ids = all_gather_rows(torch.cat(ids).to(device)).cpu().numpy()
        all_skipped = [skip for _, skips in parts for skip in skips]
        progress.done += len(all_ids) + len(all_skipped) - counted
        yield EncodedBatch(all_ids, rows, all_skipped)


def _forward(encoder: nn.Module, pixels: Tensor, device: torch.device, precision: str = "32") -> Tensor:
    images = normalize(pixels, device).contiguous(memory_format=torch.channels_last)
    # Not around the loop: a generator would leave inference mode on for its caller.
    half = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with torch.inference_mode(), half:
        features: Tensor = encoder(images)
        if features.ndim != 2:
            raise UserError(
                f"the encoder returns an output of shape {tuple(features.shape)}; give an encoder without its "
                "classifier, which returns (images, features)"
            )
        return features.float()
