"""Which images come when, and every random number of an augmentation, as pure functions: nothing is carried or saved.

A number is a hash of its coordinates (seed, epoch, image id, view, position), as in counter-based generators. So any
number of workers or ranks, and a run resumed at any step, draws the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.errors import UserError

Ids = npt.NDArray[np.int64]

# Views count from 0; these "views" name the other uses of the same hash, so that no two uses share a number.
ORDER = -1
REPLACEMENT = -2
SHARD_ORDER = -3

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the step of splitmix64's counter


def epoch_order(length: int, seed: int, epoch: int) -> Ids:
    """Return the order of the images in one epoch: a permutation (length,), by sorting hashed keys.

    >>> epoch_order(5, seed=0, epoch=0).tolist() != epoch_order(5, seed=0, epoch=1).tolist()
    True
    """
    keys = _hash(seed, epoch, np.arange(length, dtype=np.int64), ORDER, 1)[:, 0]
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def windowed_order(
    shard: Ids, shards: int, seed: int, epoch: int, window: int, start: int | None = None
) -> tuple[Ids, Ids]:
    """Return an epoch's order of images that lie in shards (n,), and the order of the shards (shards,).

    The shards are shuffled; the images come mixed from `window` of them at a time: shard p of the sequence is spread
    evenly over the moments p - window + 1 … p + 1, cut to start - window … shards - window + 1. So an epoch begins with
    `start` shards (default: all of the window), and each moment adds one until `window` are read from, to the end.
    With no more shards than the window it is `epoch_order`.

    >>> order, sequence = windowed_order(np.repeat(np.arange(6), 2), 6, seed=0, epoch=0, window=2)
    >>> sorted(order.tolist()) == list(range(12)), set(order[:2] // 2) <= set(sequence[:2])
    (True, True)
    """
    if shards <= window:
        return epoch_order(len(shard), seed, epoch), np.arange(shards, dtype=np.int64)
    keys = _hash(seed, epoch, np.arange(shards, dtype=np.int64), SHARD_ORDER, 1)[:, 0]
    sequence = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    place = np.empty(shards, dtype=np.int64)
    place[sequence] = np.arange(shards)
    first = np.maximum(place - window + 1, min(start or window, window) - window)[shard]
    last = np.minimum(place + 1, shards - window + 1)[shard]
    moment = first + (last - first) * uniforms(seed, epoch, np.arange(len(shard)), ORDER, 1)[:, 0]
    return np.argsort(moment, kind="stable").astype(np.int64, copy=False), sequence


def uniforms(
    seed: int, epoch: int | npt.NDArray[Any], ids: npt.NDArray[Any], view: int, count: int
) -> npt.NDArray[np.float64]:
    """Return numbers (n, count) in [0, 1); each row depends only on its own (seed, epoch, id, view).

    >>> batch = uniforms(0, 3, np.array([7, 8, 9]), view=1, count=4)
    >>> bool((batch[1:2] == uniforms(0, 3, np.array([8]), view=1, count=4)).all())
    True
    """
    bits = _hash(seed, epoch, ids, view, count)
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def steps_per_epoch(length: int, batch_size: int) -> int:
    """Return the number of whole batches in one pass; the images left over wait for another epoch's order."""
    if batch_size < 1:
        raise UserError(f"a batch size of {batch_size} was asked for; it must be at least 1")
    if length < batch_size:
        raise UserError(
            f"the data set has {length} images, fewer than one batch of {batch_size}; "
            f"use a batch size of at most {length}, or more images"
        )
    return length // batch_size


def batch_ids(
    length: int, batch_size: int, seed: int, step: int, order: Callable[[int, int], Ids] | None = None
) -> tuple[int, Ids]:
    """Return the epoch and the ids (batch_size,) of one step's global batch; the last, short batch is dropped.

    `order(seed, epoch)` stands for `epoch_order` where a source has an order of its own.

    >>> epoch, ids = batch_ids(length=10, batch_size=4, seed=0, step=2)
    >>> epoch, len(ids)
    (1, 4)
    """
    epoch, row = divmod(step, steps_per_epoch(length, batch_size))
    whole = _cached_order(length, seed, epoch) if order is None else order(seed, epoch)
    return epoch, whole[row * batch_size : (row + 1) * batch_size]


@functools.lru_cache(maxsize=2)  # a loader asks for the same epoch, or the next, at every step
def _cached_order(length: int, seed: int, epoch: int) -> Ids:
    order = epoch_order(length, seed, epoch)
    order.setflags(write=False)
    return order


def _hash(
    seed: int, epoch: int | npt.NDArray[Any], ids: npt.NDArray[Any], view: int, count: int
) -> npt.NDArray[np.uint64]:
    """Hash coordinates to 64 bits (n, count): absorb them one by one, then run splitmix64's counter."""
    state = _mix(_as_uint64(seed) + _GOLDEN)
    for coordinate in (epoch, ids, view):
        state = _mix(state + _GOLDEN + _as_uint64(coordinate))
    state = np.broadcast_to(state, np.shape(ids))
    counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return _mix(state[:, None] + counter)


def _as_uint64(value: int | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Wrap integers of any sign to uint64 arrays, never scalars: only array arithmetic wraps without warnings."""
    if isinstance(value, np.ndarray):
        return np.atleast_1d(value).astype(np.int64).view(np.uint64)
    return np.array([int(value) % 2**64], dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits one-to-one (the finaliser of splitmix64: Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
