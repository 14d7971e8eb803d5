"""Patches of a view, cut from a 3×3 grid in random order, for the jigsaw branches of PIRL and DetCo.

PIRL's paper cuts patches of 64 pixels at random positions in cells of 75 pixels, from a view of 225. Here the cell is a
third of the view, rounded down, and the patch has the same share of it: 63 of 74 pixels at 224, 9 of 10 at 32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snclr.methods.common.hashing import GRID, hash_below, hash_bits

SIDE = 3
PATCHES = SIDE * SIDE


def patch_size(image_size: int) -> int:
    """Return the side of a patch in pixels.

    >>> [patch_size(size) for size in (225, 224, 96, 32, 16)]
    [64, 63, 27, 9, 4]
    """
    return max(1, round(image_size // SIDE * 64 / 75))


def cut_grid(views: Tensor, ids: Tensor, *, seed: int, epoch: int, view: int) -> Tensor:
    """Return the nine patches of each view (N, 3, S, S), (9N, 3, P, P) with the nine of an image in a row.

    Order and positions of the patches are a function of (seed, epoch, image id, view), so they do not depend on the
    number of ranks or on a resume.
    """
    size = views.shape[-1]
    cell, patch = size // SIDE, patch_size(size)
    order = hash_bits(seed, epoch, ids, GRID - 2 * view, PATCHES).argsort(dim=1)  # (N, 9): the cell at each place
    offsets = hash_below(cell - patch + 1, seed, epoch, ids, GRID - 2 * view - 1, 2 * PATCHES).view(-1, 2, PATCHES)
    across = torch.arange(patch, device=views.device)
    rows = (order // SIDE * cell + offsets[:, 0])[:, :, None] + across  # (N, 9, P)
    columns = (order % SIDE * cell + offsets[:, 1])[:, :, None] + across
    image = torch.arange(len(views), device=views.device)[:, None, None, None]
    patches = views.permute(0, 2, 3, 1)[image, rows[:, :, :, None], columns[:, :, None, :]]  # (N, 9, P, P, 3)
    return patches.flatten(0, 1).permute(0, 3, 1, 2)


def join_patches() -> nn.Module:
    """Return a module that joins the features of the nine patches of an image, (9N, D) → (N, 9D)."""
    return nn.Sequential(nn.Unflatten(0, (-1, PATCHES)), nn.Flatten())


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
