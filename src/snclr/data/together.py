"""Opening images on several processes: one of each machine first; an error or a stop of one is that of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from snclr.data.patience import Stopped, until_stopped
from snclr.distributed import gather_objects, leads_machine, together

Opened = TypeVar("Opened")


def open_together(opening: Callable[[], Opened]) -> Opened:
    """Call it on one process of each machine, then on the others, which find what was downloaded and indexed.

    Where a stop is noted instead of ending the process, it ends the opening at once: Stopped, on every process. The
    call itself must not wait for other processes.
    """
    found: list[Opened] = []
    with contextlib.closing(until_stopped(_in_turns(opening, first=leads_machine()))) as turns:
        for _ in range(2):
            stopped = ""
            with together():
                try:
                    found += next(turns)
                except Stopped as stop:
                    stopped = str(stop)
            for name in gather_objects(stopped):
                if name:
                    raise Stopped(name)
    (one,) = found
    return one


def _in_turns(opening: Callable[[], Opened], *, first: bool) -> Iterator[list[Opened]]:
    yield [opening()] if first else []
    yield [] if first else [opening()]
