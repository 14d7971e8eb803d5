"""Random numbers of a training step, computed on the training device: each one is a hash of its coordinates.

The bits equal those of `data/transforms/rng.py`, which computes them on the host. A method has the image ids on the
device, and reading them there would make the host wait for the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Coordinates in place of a view number, so that no two purposes draw the same numbers. Those of
# `data/transforms/rng.py` are above −16.
NEGATIVES = -16
GRID = -17  # −17 − 2v for the order and −18 − 2v for the offsets of the patches of view v
MASK = -64

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def hash_bits(seed: int, epoch: int, ids: Tensor, view: int, count: int) -> Tensor:
    """Return 64 random bits as int64 (n, count) for images `ids` (n,); each row depends only on its own coordinates.

    >>> both = hash_bits(0, 3, torch.tensor([7, 8]), GRID, 4)
    >>> torch.equal(both[1:], hash_bits(0, 3, torch.tensor([8]), GRID, 4))
    True
    """
    state = _mix_int(_mix_int(seed + _GOLDEN) + _GOLDEN + epoch)
    bits = _mix(ids.long() + _signed(state + _GOLDEN))
    bits = _mix(bits + _signed(_GOLDEN + view))
    counter = torch.arange(1, count + 1, device=ids.device) * _signed(_GOLDEN)
    return _mix(bits[:, None] + counter)


def hash_below(limit: int, seed: int, epoch: int, ids: Tensor, view: int, count: int) -> Tensor:
    """Return random whole numbers (n, count) from 0 to limit − 1."""
    return _shift(hash_bits(seed, epoch, ids, view, count), 11) % limit


def uniform_from_bits(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) from 24 of 64 bits: float32 has no more, and MPS has no float64."""
    return _shift(bits, 40).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits one-to-one; products of int64 tensors wrap."""
    for shift, factor in _ROUNDS:
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """Scramble the lowest 64 bits of a Python number in the same way."""
    x %= 2**64
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63
