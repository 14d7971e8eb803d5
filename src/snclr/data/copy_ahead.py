"""Copy batches to a GPU one ahead of their use, on a separate stream, so that copies run beside the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from snclr.runtime.device import to_device

Item = TypeVar("Item")
Started = TypeVar("Started")


def copy_ahead(
    items: Iterator[Item],
    device: torch.device,
    tensors: Callable[[Item], Sequence[Tensor]],
    replace: Callable[[Item, list[Tensor]], Item],
) -> Iterator[Item]:
    """Yield the items with their `tensors` on the device; `replace` puts the copies into an item.

    On a CUDA device, the copy of the next item starts before an item is yielded. On other devices, the items are
    yielded as they are.
    """
    if device.type != "cuda":
        yield from items
        return
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(item: Item) -> tuple[Item, list[Tensor], torch.cuda.Event]:
        with torch.cuda.stream(side):
            copies = [to_device(part, device) for part in tensors(item)]
            return replace(item, copies), copies, side.record_event()

    for item, copies, copied in started_ahead(items, start):
        used_on = torch.cuda.current_stream(device)
        used_on.wait_event(copied)  # the device waits, not the host
        for part in copies:
            part.record_stream(used_on)  # else the next copy might reuse its memory while it is read
        yield item


def started_ahead(items: Iterator[Item], start: Callable[[Item], Started]) -> Iterator[Started]:
    """Yield start(item) of each item, after start was called for the next item too.

    >>> list(started_ahead(iter("abc"), str.upper))
    ['A', 'B', 'C']
    """
    waiting: deque[Started] = deque()
    for item in items:
        waiting.append(start(item))
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting
