"""Features of every image of a source, from an encoder that is left exactly as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from snclr.data.loader import Skip
from snclr.data.order import Ids
from snclr.data.patience import Stopped, until_stopped
from snclr.data.sources import Labels, Source, is_remote
from snclr.data.views import normalise
from snclr.distributed import fail_together, gather_objects, gather_rows, rank_and_size
from snclr.errors import UserError
from snclr.evaluate.feature_store import Block, FeatureStore
from snclr.evaluate.images import Chunk, Plan, read_chunks
from snclr.evaluate.resume import stop_together
from snclr.progress import Progress
from snclr.train.signals import StopRequest

BLOCK = 1024
"""Images whose features are kept in one file: what a stop in the middle of an extraction costs at most."""


@dataclass(frozen=True)
class Features:
    """Features of the images that could be read, in the order of their ids (indices in the source)."""

    features: Tensor
    """(n, d) float32, on the CPU."""
    labels: Tensor | None
    """(n,) int64, -1 where unknown; None where the source has none."""
    ids: Tensor
    """(n,) int64."""
    skipped: list[Skip] = field(default_factory=list)
    """The images that could not be read, and why."""

    def take(self, rows: Tensor) -> Features:
        """The chosen rows (by position) alone."""
        return Features(
            self.features[rows], None if self.labels is None else self.labels[rows], self.ids[rows], self.skipped
        )


class Encoded(NamedTuple):
    """Ids (n,) and features (n, d) of one batch, on the encoder's device, and what could not be read of it."""

    ids: Ids
    features: Tensor
    skipped: list[Skip]


def extract_features(
    encoder: nn.Module,
    source: Source,
    *,
    image_size: int,
    batch_size: int = 128,
    workers: int = 0,
    device: torch.device | str = "cpu",
    labels: Labels | None = None,
    description: str = "features",
    store: FeatureStore | None = None,
    stop: StopRequest | None = None,
    quiet: bool = False,
) -> Features:
    """Features of every image's evaluation view (centre crop), by the encoder in evaluation mode on `device`.

    Unreadable images are left out and listed. `labels` (one an image of the source) replaces the source's own: see
    `match_labels`. Several processes share the images, and each gets all features. With a `store`, blocks that it has
    are not computed again, and new ones are kept as they come; `stop` ends the work with Interrupted.
    """
    if batch_size < 1 or workers < 0:
        raise UserError(f"batch_size is {batch_size} and workers {workers}; needed are at least 1 and 0")
    if len(source) == 0:
        raise UserError(f"{source.name} has no images; give a source that has some")
    table = _Table(source)
    with Progress(description, total=len(source), quiet=quiet or rank_and_size()[0] > 0) as progress:
        missing = range(table.blocks) if store is None else _read_blocks(table, store)
        progress.done = len(source) - sum(len(table.block(number)) for number in missing)
        if progress.done:
            progress.say(f"{description}: {progress.done:,} of {len(source):,} images from {store and store.folder}")
        plan = Plan(
            np.concatenate([np.empty(0, np.int64), *map(table.block, missing)]),
            batch=BLOCK, chunk=_chunk(len(source), batch_size), part=rank_and_size(),
        )  # fmt: skip
        encoded = encode_batches(
            encoder, source, plan, image_size=image_size, workers=workers, device=device, progress=progress, stop=stop
        )
        with frozen(encoder):
            for number, batch in zip(missing, encoded, strict=True):
                block = Block(batch.ids, batch.features.cpu(), batch.skipped)
                table.put(number, block)
                if store is not None and rank_and_size()[0] == 0:
                    store.write(number, table.block(number), block, progress.say)
    return table.finish(labels)


def pixel_features(source: Source, image_size: int, *, workers: int = 0, quiet: bool = True) -> Features:
    """Flattened normalised pixels (n, 3·S·S): the baseline that any encoder should beat."""
    return extract_features(
        nn.Flatten(), source, image_size=image_size, workers=workers, description="pixels", quiet=quiet
    )


def encode_batches(
    encoder: nn.Module,
    source: Source,
    plan: Plan,
    *,
    image_size: int,
    workers: int,
    device: torch.device | str,
    progress: Progress,
    start: int = 0,
    stop: StopRequest | None = None,
) -> Iterator[Encoded]:
    """Encode the batches of a plan from `start` on, chunk by chunk; each process does its part, and gets all of it.

    The encoder's mode is the caller's concern: see `frozen`. A stop gives up the batch under way: Interrupted.
    """
    device = torch.device(device)
    encoder.to(device)
    own = _Part.empty(device)
    clock = time.monotonic()
    chunks = read_chunks(source, plan, image_size=image_size, workers=workers, start=start)
    if stop is not None and is_remote(source):
        chunks = until_stopped(chunks)
    while (answer := own.next_of(chunks)) is not None:
        before, clock = clock, time.monotonic()
        own.skipped += answer.skipped
        if len(answer.ids):
            own.ids.append(torch.as_tensor(answer.ids))  # a worker sends a tensor
            try:
                own.features.append(_forward(encoder, answer.pictures, device))
            except UserError as error:
                own.error = error
        waited, before, clock = clock - before, clock, time.monotonic()
        # A guess at what all processes did meanwhile, put right when the batch is complete.
        guess = (len(answer.ids) + len(answer.skipped)) * plan.part[1]
        own.counted += guess
        progress.update(guess, waited, clock - before)
        if answer.ends_batch or own.error is not None or (stop is not None and stop.requested is not None):
            encoded = own.share(stop)
            progress.done += len(encoded.ids) + len(encoded.skipped) - own.counted
            yield encoded
            own = _Part.empty(device)
            clock = time.monotonic()
    if own.gave_up:
        own.share(stop)


@dataclass
class _Part:
    """What this process has of a batch so far."""

    device: torch.device
    ids: list[Tensor]
    features: list[Tensor]
    skipped: list[Skip]
    counted: int = 0
    error: UserError | None = None
    gave_up: bool = False
    """Reading failed, or a stop ended the wait for it: the others are to hear of it."""

    @classmethod
    def empty(cls, device: torch.device) -> _Part:
        return cls(device, [], [], [])

    def next_of(self, chunks: Iterator[Chunk]) -> Chunk | None:
        """The next chunk; None where no more come."""
        try:
            return next(chunks, None)
        except UserError as error:
            self.error = error
        except Stopped:  # which the StopRequest knows of
            pass
        self.gave_up = True
        return None

    def share(self, stop: StopRequest | None) -> Encoded:
        """The whole batch, from all processes, in the order of the plan; a stop or an error of any is that of all."""
        fail_together(self.error)
        stop_together(stop)
        news = gather_objects((self.features[0].shape[1] if self.features else 0, self.skipped))
        width = max(found for found, _ in news)
        rows = gather_rows(torch.cat([torch.empty(0, width, device=self.device), *self.features]))
        ids = gather_rows(torch.cat([torch.empty(0, dtype=torch.int64), *self.ids]).to(self.device))
        return Encoded(ids.cpu().numpy(), rows, [skip for _, skips in news for skip in skips])


@contextlib.contextmanager
def frozen(encoder: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards each part is in the mode it was in.

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    >>> with frozen(net):
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


def _forward(encoder: nn.Module, pictures: Tensor, device: torch.device) -> Tensor:
    images = normalise(pictures, device).contiguous(memory_format=torch.channels_last)
    # Here, not around the loop: a generator would leave the mode on for its caller.
    with torch.inference_mode():
        features: Tensor = encoder(images)
        if features.ndim != 2:
            raise UserError(
                f"the encoder gives {tuple(features.shape)} for {len(images)} images; an encoder without its "
                "classifier, which gives (images, features), is needed"
            )
        return features.float()


def _chunk(images: int, batch_size: int) -> int:
    """Images encoded at once: fewer where there are few, so that several processes have a share of them.

    It depends on nothing but the number of images: what is encoded together decides the last bits of the features.
    """
    return min(batch_size, max(32, -(-images // 8)))


def _read_blocks(table: _Table, store: FeatureStore) -> list[int]:
    """Fill the table from the store; the blocks that not every process could read."""
    found = set()
    for number in range(table.blocks):
        block = store.read(number, table.block(number))
        if block is not None and table.fits(block):
            table.put(number, block)
            found.add(number)
    common = set.intersection(*gather_objects(found))
    return [number for number in range(table.blocks) if number not in common]


class _Table:
    """Features of a source being filled block by block, in any order; held once, since they may be most of memory."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.blocks = -(-len(source) // BLOCK)
        self.rows = torch.empty(0)
        self._parts: dict[int, tuple[Ids, list[Skip]]] = {}

    def block(self, number: int) -> Ids:
        """The images of a block."""
        return np.arange(number * BLOCK, min((number + 1) * BLOCK, len(self.source)), dtype=np.int64)

    def fits(self, block: Block) -> bool:
        """Whether a block has the width of those before."""
        return self.rows.ndim < 2 or len(block.ids) == 0 or block.features.shape[1] == self.rows.shape[1]

    def put(self, number: int, block: Block) -> None:
        """Take a block in; each image has its row until all are there."""
        if len(block.ids):
            if self.rows.ndim < 2:
                self.rows = torch.empty(len(self.source), block.features.shape[1])
            self.rows[torch.from_numpy(block.ids)] = block.features.float()
        self._parts[number] = (block.ids, block.skipped)

    def finish(self, labels: Labels | None) -> Features:
        """The rows of the readable images, moved together in place."""
        parts = [self._parts[number] for number in range(self.blocks)]
        skipped = sorted((skip for _, skips in parts for skip in skips), key=lambda skip: skip.index)
        ids = np.concatenate([ids for ids, _ in parts])
        if len(ids) == 0:
            raise UserError(
                f"none of the {len(self.source)} images of {self.source.name} could be read; the first, "
                f"{skipped[0].key}: {skipped[0].reason}"
            )
        place = 0
        for kept, _ in parts if skipped else ():
            self.rows[place : place + len(kept)] = self.rows[torch.from_numpy(kept)]
            place += len(kept)
        labels = self.source.labels if labels is None else labels
        known = None if labels is None else torch.from_numpy(labels[ids])
        return Features(self.rows[: len(ids)], known, torch.from_numpy(ids), skipped)
