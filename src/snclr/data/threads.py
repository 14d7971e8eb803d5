"""How many threads an operation gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_SMALL = 2**22  # numbers in a tensor: 256 images of 73 × 73 pixels


@contextlib.contextmanager
def threads_for(numbers: int) -> Iterator[None]:
    """Let torch use one thread for operations on a small tensor, as many as it is set to for a large one.

    A small tensor's hundred operations are hardly faster with several threads, which meet after each; and where other
    programs run too, they wait for each other far longer than they work.
    """
    before = torch.get_num_threads()
    if numbers >= _SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
