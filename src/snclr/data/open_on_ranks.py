"""Open a dataset on all ranks: first on one rank per node, then on the others."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

from snclr.distributed.collectives import all_gather_objects, is_first_rank_on_node, raise_on_all_ranks
from snclr.runtime.stop import StopRequested, until_stopped

DatasetT = TypeVar("DatasetT")


def open_on_all_ranks(open_dataset: Callable[[], DatasetT]) -> DatasetT:
    """Call `open_dataset` on one rank per node, which downloads and indexes, then on the other ranks.

    A stop signal on any rank raises StopRequested on all of them. `open_dataset` must not call collectives.
    """
    opened: list[DatasetT | None] = []
    first = is_first_rank_on_node()
    phases = (open_dataset() if is_first_phase == first else None for is_first_phase in (True, False))
    with contextlib.closing(until_stopped(phases)) as results:
        for _ in range(2):
            received = None
            with raise_on_all_ranks(long=True):
                try:
                    opened.append(next(results))
                except StopRequested as stop:
                    received = stop.signal
            for signum in all_gather_objects(received):
                if signum is not None:
                    raise StopRequested(signum)
    return next(dataset for dataset in opened if dataset is not None)
