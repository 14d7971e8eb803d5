"""Batch norms that see images and patches of images: only the images count for the running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def keep_running_statistics(network: nn.Module) -> Iterator[None]:
    """Within the block, batch norms in training mode normalize by their batch and leave their running statistics alone.

    The encoder that is exported sees images only, and the statistics of small patches are others.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    kept = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer in layers:
        layer.momentum, layer.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for layer, (momentum, count) in zip(layers, kept, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, count
