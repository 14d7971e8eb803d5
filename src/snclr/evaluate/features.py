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
from snclr.data.sources import Labels, Source
from snclr.data.views import normalise
from snclr.errors import UserError
from snclr.evaluate.images import Plan, read_chunks
from snclr.train.progress import Progress


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
    """Features (n, d) of one batch, on the encoder's device; `asked` counts the unreadable images too."""

    ids: Ids
    features: Tensor
    asked: int
    wait_seconds: float
    compute_seconds: float


def extract_features(
    encoder: nn.Module,
    source: Source,
    *,
    image_size: int,
    batch_size: int = 256,
    workers: int = 0,
    device: torch.device | str = "cpu",
    labels: Labels | None = None,
    description: str = "features",
    quiet: bool = False,
) -> Features:
    """Features of every image's evaluation view (centre crop), by the encoder in evaluation mode on `device`.

    Unreadable images are left out and listed. `labels` (one an image of the source) replaces the source's own: see
    `match_labels`.
    """
    if batch_size < 1 or workers < 0:
        raise UserError(f"batch_size is {batch_size} and workers {workers}; needed are at least 1 and 0")
    if len(source) == 0:
        raise UserError(f"{source.name} has no images; give a source that has some")
    plan = Plan(np.arange(len(source), dtype=np.int64), batch=batch_size, chunk=batch_size)
    skipped: dict[int, Skip] = {}
    out = torch.empty(0)
    kept: list[Ids] = []
    count = 0
    with Progress(description, total=len(source), quiet=quiet) as progress, frozen(encoder):
        encoded = encode_batches(
            encoder, source, plan, image_size=image_size, workers=workers, device=device, skipped=skipped
        )
        for batch in encoded:
            if len(batch.ids):
                if count == 0:  # filled in place: joining batches at the end would hold all of it twice
                    out = torch.empty(len(source), batch.features.shape[1])
                out[count : count + len(batch.ids)] = batch.features
                count += len(batch.ids)
                kept.append(batch.ids)
            progress.update(batch.asked, batch.wait_seconds, batch.compute_seconds)
    return _finish(source, out[:count], np.concatenate([np.empty(0, np.int64), *kept]), labels, skipped)


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
    skipped: dict[int, Skip],
) -> Iterator[Encoded]:
    """Encode the batches of a plan, chunk by chunk; what cannot be read is added to `skipped`.

    The encoder's mode is the caller's concern: see `frozen`.
    """
    device = torch.device(device)
    encoder.to(device)
    ids, parts = [np.empty(0, np.int64)], [torch.empty(0, 0, device=device)]
    asked, wait, compute = 0, 0.0, 0.0
    clock = time.monotonic()
    for answer in read_chunks(source, plan, image_size=image_size, workers=workers):
        before, clock = clock, time.monotonic()
        wait += clock - before
        asked += len(answer.ids) + len(answer.skipped)
        skipped.update({skip.index: skip for skip in answer.skipped})
        if len(answer.ids):
            ids.append(answer.ids)
            parts.append(_forward(encoder, answer.pictures, device))
        before, clock = clock, time.monotonic()
        compute += clock - before
        if answer.ends_batch:
            yield Encoded(np.concatenate(ids), torch.cat(parts[1:] or parts), asked, wait, compute)
            ids, parts, asked, wait, compute = ids[:1], parts[:1], 0, 0.0, 0.0
            clock = time.monotonic()


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


def _finish(source: Source, features: Tensor, ids: Ids, labels: Labels | None, skipped: dict[int, Skip]) -> Features:
    if len(ids) == 0:
        first = next(iter(skipped.values()))
        raise UserError(
            f"none of the {len(source)} images of {source.name} could be read; the first, {first.key}: {first.reason}"
        )
    labels = source.labels if labels is None else labels
    return Features(
        features,
        None if labels is None else torch.from_numpy(labels[ids]),
        torch.from_numpy(ids),
        [skipped[index] for index in sorted(skipped)],
    )
