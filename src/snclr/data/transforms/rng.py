"""Counter-based random numbers: each one is a hash of (seed, epoch, image id, view, position).

There is no generator state to carry or save, so any number of workers or ranks, and a run resumed at any step, draws
the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Views count from 0. The order, replacements and the shard order use negative view numbers, so that no two purposes
# draw the same numbers. Methods draw with −16 and below (`methods/common/hashing.py`).
ORDER = -1
REPLACEMENT = -2
SHARD_ORDER = -3

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of splitmix64


def uniforms(
    seed: int, epoch: int | npt.NDArray[Any], ids: npt.NDArray[Any], view: int, count: int
) -> npt.NDArray[np.float64]:
    """Return numbers (n, count) in [0, 1); each row depends only on its own (seed, epoch, id, view).

    >>> batch = uniforms(0, 3, np.array([7, 8, 9]), view=1, count=4)
    >>> bool((batch[1:2] == uniforms(0, 3, np.array([8]), view=1, count=4)).all())
    True
    """
    bits = hash_bits(seed, epoch, ids, view, count)
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def hash_bits(
    seed: int, epoch: int | npt.NDArray[Any], ids: npt.NDArray[Any], view: int, count: int
) -> npt.NDArray[np.uint64]:
    """Hash coordinates to uint64 (n, count): absorb them one by one, then run the counter of splitmix64."""
    state = _mix(_as_uint64(seed) + _GOLDEN)
    for coordinate in (epoch, ids, view):
        state = _mix(state + _GOLDEN + _as_uint64(coordinate))
    state = np.broadcast_to(state, np.shape(ids))
    counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return _mix(state[:, None] + counter)


def _as_uint64(value: int | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Wrap signed integers to uint64 arrays, never scalars: only array arithmetic wraps without warnings."""
    if isinstance(value, np.ndarray):
        return np.atleast_1d(value).astype(np.int64).view(np.uint64)
    return np.array([int(value) % 2**64], dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits one-to-one (the finalizer of splitmix64: Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
