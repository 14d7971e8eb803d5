"""Feature extraction: the features of every image of a dataset by a frozen encoder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from snclr.data.copy_ahead import copy_ahead
from snclr.data.datasets.base import ImageDataset, Labels
from snclr.data.loader import Skip
from snclr.data.remote.retry import until_stopped
from snclr.data.sampler import Ids
from snclr.data.transforms.views import normalize
from snclr.distributed.collectives import all_gather_objects, all_gather_rows, raise_error_on_all_ranks, rank_and_size
from snclr.errors import UserError, count
from snclr.evaluation.batches import BatchPlan, read_chunks
from snclr.evaluation.feature_store import Block, FeatureStore
from snclr.evaluation.state import raise_if_stop_requested
from snclr.runtime.progress import Progress
from snclr.runtime.stop import StopFlag, StopRequested

BLOCK = 1024
"""Images per cached file: the most work that a stop in the middle of an extraction costs."""


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

    def take(self, rows: Tensor) -> Features:
        """Select rows by position."""
        labels = None if self.labels is None else self.labels[rows]
        return Features(self.features[rows], labels, self.ids[rows], self.skipped)


def extract_features(
    encoder: nn.Module, dataset: ImageDataset, *, image_size: int, batch_size: int = 128, workers: int = 0,
    device: torch.device | str = "cpu", labels: Labels | None = None, description: str = "features",
    store: FeatureStore | None = None, stop: StopFlag | None = None, quiet: bool = False, precision: str = "32",
) -> Features:  # fmt: skip
    """Extract the features of every image's center crop with the encoder in evaluation mode on `device`.

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
        encoded = {} if store is None else _read_blocks(store, blocks)
        missing = [number for number in range(len(blocks)) if number not in encoded]
        progress.done = sum(len(blocks[number]) for number in encoded)
        if store is not None and progress.done:
            done = f"{progress.done:,} of {count(len(dataset), 'image')}"
            progress.print(f"{progress.description}: {done} read from the cache ({store.parent})")
        # The size of a chunk must not depend on the world size, since the images of a chunk determine the last bits
        # of their features. A small dataset has small chunks, so that all ranks get a share.
        chunk = min(batch_size, max(32, -(-len(dataset) // 8)))
        ids = np.concatenate([np.empty(0, np.int64), *(blocks[number] for number in missing)])
        plan = BatchPlan(ids, batch=BLOCK, chunk=chunk, rank=rank, world_size=world_size)
        batches = encode_batches(
            encoder, dataset, plan, image_size=image_size, workers=workers, device=device, progress=progress, stop=stop,
            precision=precision,
        )  # fmt: skip
        with eval_mode(encoder):
            for number, batch in zip(missing, batches, strict=True):
                encoded[number] = block = batch._replace(features=batch.features.cpu())
                if store is not None and rank == 0:
                    store.write(number, blocks[number], block, progress.print)
    return _concatenate(dataset, encoded, labels)


def _read_blocks(store: FeatureStore, blocks: list[Ids]) -> dict[int, Block]:
    """Return the cached blocks by number; those that not every rank could read are left out."""
    read = ((number, store.read(number, ids)) for number, ids in enumerate(blocks))
    cached = {number: block for number, block in read if block is not None}
    common = set.intersection(*all_gather_objects(set(cached)))
    return {number: cached[number] for number in common}


def _concatenate(dataset: ImageDataset, blocks: dict[int, Block], labels: Labels | None) -> Features:
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
        if len(block.ids):
            features[start : start + len(block.ids)] = block.features
            start += len(block.ids)
    labels = dataset.labels if labels is None else labels
    known = None if labels is None else torch.from_numpy(labels[ids])
    return Features(features, known, torch.from_numpy(ids), skipped)


def feature_width(encoder: nn.Module, image_size: int, device: torch.device | str) -> int:
    """Return the number of features of an encoder, found with one black image."""
    black = torch.zeros(1, image_size, image_size, 3, dtype=torch.uint8)
    with eval_mode(encoder):
        return _forward(encoder.to(device), black, torch.device(device)).shape[1]


def encode_batches(
    encoder: nn.Module, dataset: ImageDataset, plan: BatchPlan, *, image_size: int, workers: int,
    device: torch.device | str, progress: Progress, start: int = 0, stop: StopFlag | None = None,
    precision: str = "32",
) -> Iterator[Block]:  # fmt: skip
    """Encode the batches of a plan from `start`; each rank encodes its chunks and yields the whole batch on `device`.

    The caller sets the encoder's mode (see `eval_mode`). A stop discards the current batch and raises StopRequested. It
    and the errors of any rank are raised on all ranks.
    """
    device = torch.device(device)
    encoder.to(device)
    pin = device.type == "cuda"
    chunks = read_chunks(dataset, plan, image_size=image_size, workers=workers, start=start, pin=pin)
    if stop is not None and dataset.remote:
        chunks = until_stopped(chunks)
    chunks = copy_ahead(chunks, device, lambda chunk: [chunk.images], lambda chunk, new: chunk._replace(images=new[0]))
    for _ in range(start, plan.steps):
        ids, features = [torch.empty(0, dtype=torch.int64)], []
        skipped: list[Skip] = []
        error: UserError | None = None
        counted, clock = 0, time.monotonic()
        try:
            for chunk in chunks:
                waited = time.monotonic() - clock
                skipped += chunk.skipped
                if len(chunk.ids):
                    ids.append(torch.as_tensor(chunk.ids))  # a worker sends a tensor
                    features.append(_forward(encoder, chunk.images, device, precision))
                # An estimate for all ranks, corrected when the batch is complete.
                count = (len(chunk.ids) + len(chunk.skipped)) * plan.world_size
                counted += count
                progress.update(count, waited, time.monotonic() - clock - waited)
                if chunk.ends_batch or (stop is not None and stop.requested is not None):
                    break
                clock = time.monotonic()
        except UserError as failure:
            error = failure
        except StopRequested:  # of a remote dataset; `stop` is set as well
            pass
        raise_error_on_all_ranks(error)
        raise_if_stop_requested(stop)
        parts = all_gather_objects((features[0].shape[1] if features else 0, skipped))
        width = max(columns for columns, _ in parts)
        rows = all_gather_rows(torch.cat([torch.empty(0, width, device=device), *features]))
        all_ids = all_gather_rows(torch.cat(ids).to(device)).cpu().numpy()
        all_skipped = [skip for _, skips in parts for skip in skips]
        progress.done += len(all_ids) + len(all_skipped) - counted
        yield Block(all_ids, rows, all_skipped)


@contextlib.contextmanager
def eval_mode(encoder: nn.Module) -> Iterator[None]:
    """Set the encoder to eval mode inside the block and restore the mode of each module afterward.

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    >>> with eval_mode(net):
    ...     net[1].training
    False
    >>> net[1].training
    True
    """
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


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
