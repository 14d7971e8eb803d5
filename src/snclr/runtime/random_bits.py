"""Random numbers without a generator: 64 bits that are a hash of coordinates, by splitmix64 (Steele, Lea, Flood, 2014).

One implementation serves NumPy arrays on the host and torch tensors on any device: both wrap products of int64.
"""

from typing import Any

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64


def hash_bits(seed: int, epoch: int, ids: Any, view: int, places: Any) -> Any:
    """Return 64 bits as int64 (n, k) for `ids` (n,) at the `places` (k,) from 1 on: int64 arrays, or tensors.

    Each number depends only on its own (seed, epoch, id, view, place).
    """
    state = _mix(np.array([signed(seed + GOLDEN)]))
    state = _mix(state + signed(GOLDEN + epoch))
    bits = _mix(ids + signed(int(state[0]) + GOLDEN))
    bits = _mix(bits + signed(GOLDEN + view))
    return _mix(bits[:, None] + places * signed(GOLDEN))


def shift_right(x: Any, bits: int) -> Any:
    """Shift int64 right and fill with zeros; the operator fills with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(x: Any) -> Any:
    """Scramble 64 bits one-to-one: the finalizer of splitmix64."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)
