"""Masks of image patches, each a pure function of (seed, epoch, image id), computed on the device of the ids.

The hash is that of `data/transforms/rng.py`, so a mask does not depend on ranks, workers or a resume. It is written in
torch here: with numpy the host would have to wait for the ids. lightly's masks draw from global generators.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

PURPOSE = -4
"""The view number of masks in the hash; `data/transforms/rng.py` uses -1 to -3 for other purposes."""
BLOCK_TRIES = 32
"""Blocks that are tried per image; the patches that are missing then are masked one by one."""
_MIN_BLOCK = 16 / 196  # smallest block as a share of the image, and its flattest shape, in BEiT and CAE
_MIN_ASPECT = 0.3

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BITS = 2**64


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
    order = random_bits(seed, epoch, ids, patches).argsort(dim=1)
    return PatchMask(order[:, :visible].sort(dim=1).values, order[:, visible:].sort(dim=1).values)


def block_masks(seed: int, epoch: int, ids: Tensor, grid: int, visible: int) -> PatchMask:
    """Mask random rectangles of a grid × grid image until `visible` patches are left (BEiT's block-wise masking).

    A rectangle has at least 8 % of the patches, unless fewer are missing, and sides in a ratio of 0.3 to 1/0.3.
    """
    patches = grid * grid
    bits = random_bits(seed, epoch, ids, 4 * BLOCK_TRIES + patches)
    numbers = _uniform(bits[:, : 4 * BLOCK_TRIES]).view(len(ids), BLOCK_TRIES, 4)
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


def random_bits(seed: int, epoch: int, ids: Tensor, count: int) -> Tensor:
    """Hash (seed, epoch, id, PURPOSE) to int64 (n, count), the bits of `hash_bits` in `data/transforms/rng.py`."""
    state = _mix_int(seed + _GOLDEN)
    state = _mix_int(state + _GOLDEN + epoch)
    rows = _mix(ids + _signed(state + _GOLDEN))
    rows = _mix(rows + _signed(_GOLDEN + PURPOSE))
    counter = torch.arange(1, count + 1, device=ids.device) * _signed(_GOLDEN)
    return _mix(rows[:, None] + counter)


def _uniform(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) from the upper 24 bits: float32 has no more, and MPS has no float64."""
    return _shift(bits, 40).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _FACTORS:
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    x %= _BITS
    for shift, factor in _FACTORS:
        x = (x ^ (x >> shift)) * factor % _BITS
    return x ^ (x >> 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift the 64 bits to the right; torch's own shift of a signed number would repeat the sign."""
    return (x >> count) & (2 ** (64 - count) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the lower 64 bits of `value`."""
    value %= _BITS
    return value - _BITS if value >= _BITS // 2 else value
