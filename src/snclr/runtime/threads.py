"""Limits on the threads torch uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_SMALL = 2**22  # elements of a tensor: 256 images of 73 × 73 pixels


@contextlib.contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Run the block with `count` torch threads; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(elements: int) -> contextlib.AbstractContextManager[None]:
    """Run operations on a small tensor with one thread.

    More threads hardly speed them up, and they wait for each other when the machine is busy.
    """
    return limit_threads(1 if elements < _SMALL else 0)
