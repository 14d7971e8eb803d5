"""Random numbers of a training step, computed on the training device: each one is a hash of its coordinates.

`data/sampler.py` draws by the same hash on the host. A method has the image ids on the device, and reading them there
would make the host wait for the step.
"""

import torch
from torch import Tensor

from snclr.runtime import random_bits

# Coordinates in place of a view number, so that no two purposes draw the same numbers. Those of
# `data/sampler.py` are above −16.
NEGATIVES = -16
GRID = -17  # −17 − 2v for the order and −18 − 2v for the offsets of the patches of view v
MASK = -64


def hash_bits(seed: int, epoch: int, ids: Tensor, view: int, count: int) -> Tensor:
    """Return 64 random bits as int64 (n, count) for images `ids` (n,); each row depends only on its own coordinates.

    >>> both = hash_bits(0, 3, torch.tensor([7, 8]), GRID, 4)
    >>> torch.equal(both[1:], hash_bits(0, 3, torch.tensor([8]), GRID, 4))
    True
    """
    places = torch.arange(1, count + 1, device=ids.device)
    return random_bits.hash_bits(seed, epoch, ids.long(), view, places)


def hash_below(limit: int, seed: int, epoch: int, ids: Tensor, view: int, count: int) -> Tensor:
    """Return random whole numbers (n, count) from 0 to limit − 1."""
    return random_bits.shift_right(hash_bits(seed, epoch, ids, view, count), 11) % limit


def uniform_from_bits(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) from 24 of 64 bits: float32 has no more, and MPS has no float64."""
    return random_bits.shift_right(bits, 40).float() * 2.0**-24
