"""Counter-based random numbers, epoch orders and global batches: pure functions of the seed, the epoch and the step.

A random number is a hash of (seed, epoch, image id, view, position). There is no generator state to carry or save, so
any number of workers or ranks, and a run resumed at any step, draws the same numbers.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from snclr.errors import UserError, count
from snclr.runtime import random_bits

Ids = npt.NDArray[np.int64]

# Views count from 0. The order, replacements and the shard order use negative view numbers, so that no two purposes
# draw the same numbers. Methods draw with −16 and below (`methods/common/hashing.py`).
ORDER = -1
REPLACEMENT = -2
SHARD_ORDER = -3


class ViewKey(NamedTuple):
    """What the random numbers of one view of n images depend on; `ids` (n,)."""

    seed: int
    epoch: int
    ids: Ids
    view: int


@functools.lru_cache(maxsize=2)  # consecutive steps need the same epoch, or the next one
def epoch_order(length: int, seed: int, epoch: int) -> Ids:
    """Return the permutation (length,) of one epoch, read-only.

    >>> epoch_order(5, seed=0, epoch=0).tolist() != epoch_order(5, seed=0, epoch=1).tolist()
    True
    """
    order = _shuffled(length, seed, epoch, ORDER)
    order.setflags(write=False)
    return order


def windowed_order(
    shard: Ids, shards: int, seed: int, epoch: int, window: int, start: int | None = None
) -> tuple[Ids, Ids]:
    """Return an epoch's permutation of images by their `shard` (n,), and the permutation (shards,) of the shards.

    Shards are shuffled, and images are mixed from a sliding window of `window` shards: each image gets a random time,
    and the order is that of the times. The times of shard p of the shuffled sequence are uniform in p - window + 1 …
    p + 1, clipped to start - window … shards - window + 1. With 6 shards and window 2, shard 0 has times in 0 … 1,
    shard 1 in 0 … 2, shard 2 in 1 … 3, and shard 5 in 4 … 5. So an epoch begins with `start` shards (default: the whole
    window) and adds one per unit of time until the window is full. With at most `window` shards the result is
    `epoch_order`.

    >>> order, sequence = windowed_order(np.repeat(np.arange(6), 2), 6, seed=0, epoch=0, window=2)
    >>> sorted(order.tolist()) == list(range(12)), set(order[:2] // 2) <= set(sequence[:2])
    (True, True)
    """
    if shards <= window:
        return epoch_order(len(shard), seed, epoch), np.arange(shards)
    sequence = _shuffled(shards, seed, epoch, SHARD_ORDER)
    position = np.argsort(sequence)
    first = np.maximum(position - window + 1, min(start or window, window) - window)[shard]
    last = np.minimum(position + 1, shards - window + 1)[shard]
    time = first + (last - first) * uniforms(seed, epoch, np.arange(len(shard)), ORDER, 1)[:, 0]
    return np.argsort(time, kind="stable"), sequence


def steps_per_epoch(length: int, batch_size: int) -> int:
    """Return the number of full batches per epoch; the incomplete last batch is dropped."""
    if batch_size < 1:
        raise UserError(f"the batch size is {batch_size}; it must be at least 1")
    if length < batch_size:
        raise UserError(
            f"the dataset has {count(length, 'image')}, fewer than one batch of {batch_size}."
            f" Use a batch_size of at most {length}, or more images."
        )
    return length // batch_size


def batch_ids(
    length: int, batch_size: int, seed: int, step: int, order: Callable[[int, int], Ids] | None = None
) -> tuple[int, Ids]:
    """Return the epoch and the image ids (batch_size,) of one step's global batch.

    `order(seed, epoch)` replaces `epoch_order` for datasets with an order of their own.

    >>> epoch, ids = batch_ids(length=10, batch_size=4, seed=0, step=2)
    >>> epoch, len(ids)
    (1, 4)
    """
    epoch, step_in_epoch = divmod(step, steps_per_epoch(length, batch_size))
    permutation = epoch_order(length, seed, epoch) if order is None else order(seed, epoch)
    return epoch, permutation[step_in_epoch * batch_size : (step_in_epoch + 1) * batch_size]


def with_replacements(index: int, length: int, seed: int, epoch: int, *, tries: int) -> Iterator[int]:
    """Yield an image id, then random ids of the dataset that replace it if the image is bad."""
    yield index
    for number in uniforms(seed, epoch, np.array([index]), REPLACEMENT, tries)[0]:
        yield int(number * length)


def uniforms(seed: int, epoch: int, ids: Ids, view: int, places: int) -> npt.NDArray[np.float64]:
    """Return numbers (n, places) in [0, 1); each row depends only on its own (seed, epoch, id, view).

    >>> batch = uniforms(0, 3, np.array([7, 8, 9]), view=1, places=4)
    >>> bool((batch[1:2] == uniforms(0, 3, np.array([8]), view=1, places=4)).all())
    True
    """
    bits = random_bits.hash_bits(seed, epoch, ids, view, np.arange(1, places + 1))
    return np.asarray(random_bits.shift_right(bits, 11) * 2.0**-53)


def _shuffled(length: int, seed: int, epoch: int, purpose: int) -> Ids:
    """Return the permutation (length,) that sorts the hashes of the numbers from 0 to length − 1."""
    keys = random_bits.hash_bits(seed, epoch, np.arange(length), purpose, np.array([1]))[:, 0]
    return np.argsort(keys.view(np.uint64), kind="stable")
