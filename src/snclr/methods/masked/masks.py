"""Masks of image patches, each a pure function of (seed, epoch, image id), computed on the device of the ids.

So a mask does not depend on ranks, workers or a resume. lightly's masks draw from global generators.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from snclr.methods.common.hashing import MASK, hash_bits, uniform_from_bits

BLOCK_TRIES = 32
"""Blocks that are tried per image; the patches that are missing then are masked one by one."""
_MIN_BLOCK = 16 / 196  # smallest block as a share of the image, and its flattest shape, in BEiT and CAE
_MIN_ASPECT = 0.3


class PatchMask(NamedTuple):
    """Numbers of the visible (N, V) and of the masked patches (N, M) of each image, ascending."""

    visible: Tensor
    masked: Tensor


def visible_count(patches: int, mask_ratio: float) -> int:
    """Return how many patches stay visible: at least one, and at least one is masked.

    >>> visible_count(196, 0.75), visible_count(196, 0.5), visible_count(4, 0.99)
    (49, 98, 1)
    """
    return min(max(int(patches * (1 - mask_ratio) + 1e-9), 1), patches - 1)


def random_masks(seed: int, epoch: int, ids: Tensor, patches: int, visible: int) -> PatchMask:
    """Choose the visible patches of each image uniformly at random (MAE).

    >>> mask = random_masks(0, 0, torch.arange(2), patches=16, visible=4)
    >>> mask.visible.shape, mask.masked.shape
    (torch.Size([2, 4]), torch.Size([2, 12]))
    """
    order = hash_bits(seed, epoch, ids, MASK, patches).argsort(dim=1)
    return PatchMask(order[:, :visible].sort(dim=1).values, order[:, visible:].sort(dim=1).values)


def block_masks(seed: int, epoch: int, ids: Tensor, grid: int, visible: int) -> PatchMask:
    """Mask random rectangles of a grid × grid image until `visible` patches are left (BEiT's block-wise masking).

    A rectangle has at least 8 % of the patches, unless fewer are missing, and sides in a ratio of 0.3 to 1/0.3.
    """
    patches = grid * grid
    bits = hash_bits(seed, epoch, ids, MASK, 4 * BLOCK_TRIES + patches)
    numbers = uniform_from_bits(bits[:, : 4 * BLOCK_TRIES]).view(len(ids), BLOCK_TRIES, 4)
    place = torch.arange(grid, device=ids.device)
    mask = torch.zeros(len(ids), grid, grid, dtype=torch.bool, device=ids.device)
    missing = torch.full((len(ids),), patches - visible, device=ids.device)
    for number in range(BLOCK_TRIES):
        area, shape, vertical, horizontal = numbers[:, number].unbind(1)
        size = _MIN_BLOCK * patches + area * (missing - _MIN_BLOCK * patches)
        aspect = torch.exp((2 * shape - 1) * math.log(_MIN_ASPECT))
        height, width = (size * aspect).sqrt().round(), (size / aspect).sqrt().round()
        top, left = (vertical * (grid - height + 1)).floor(), (horizontal * (grid - width + 1)).floor()
        rows = (place >= top[:, None]) & (place < (top + height)[:, None])
        columns = (place >= left[:, None]) & (place < (left + width)[:, None])
        added = rows[:, :, None] & columns[:, None, :] & ~mask
        count = added.sum(dim=(1, 2))
        fits = (height < grid) & (width < grid) & (count <= missing)
        mask |= added & fits[:, None, None]
        missing = missing - count * fits
    # Masked patches first, then the others in random order: those that are missing are the first of these.
    order = bits[:, 4 * BLOCK_TRIES :].argsort(dim=1)
    order = order.gather(1, (~mask.flatten(1)).gather(1, order).byte().argsort(dim=1, stable=True))
    masked = patches - visible
    return PatchMask(order[:, masked:].sort(dim=1).values, order[:, :masked].sort(dim=1).values)
