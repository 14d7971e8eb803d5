"""Compute numbered items ahead of their use, in a thread or worker processes, and copy them to a GPU.

torch's DataLoader alone lacks three things: workers that leave stop signals to the parent (which still needs their
batches to finish a step), workers that end with a killed parent even while they wait for the network, and UserErrors
without the traceback of a worker.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from snclr.errors import UserError
from snclr.runtime.device import to_device
from snclr.runtime.stop import STOP_SIGNALS

Item = TypeVar("Item")
Started = TypeVar("Started")

PREFETCH = 2
"""Items computed ahead, by each worker."""
_GRACE_SECONDS = 1.0  # for a worker to end by itself
_FEEDER_SECONDS = 10.0  # for a thread of a closed queue to end


def read_items(
    items: Dataset[Item], start: int, stop: int, *, workers: int, in_memory: bool = False, pin: bool = False
) -> Iterator[Item]:
    """Yield items start … stop - 1, computed ahead by `workers` processes, or one thread if the data is in memory."""
    if workers == 0 or start == stop:
        return map(items.__getitem__, range(start, stop))
    if in_memory:
        return in_thread(items.__getitem__, start, stop)
    return in_processes(items, start, stop, workers=workers, pin=pin)


def in_thread(compute: Callable[[int], Item], start: int, stop: int) -> Iterator[Item]:
    """Yield compute(start) … compute(stop - 1), computed ahead by one thread."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snclr-views")
    try:
        for future in started_ahead(range(start, stop), lambda number: pool.submit(compute, number), PREFETCH):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_processes(items: Dataset[Item], start: int, stop: int, *, workers: int, pin: bool = False) -> Iterator[Item]:
    """Yield items start … stop - 1 from worker processes, which end with this iterator or with the parent.

    `pin` copies items with a `pin_memory` method to pinned memory.
    """
    running = _run_workers(items, start, stop, workers, pin)
    # At exit, Python sends SIGTERM to the workers and waits for them, but they ignore it: end them before that.
    atexit.register(running.close)
    unregister = atexit.unregister  # an iterator left open is closed after module globals are deleted
    try:
        yield from running
    finally:
        running.close()
        unregister(running.close)


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


def started_ahead(items: Iterable[Item], start: Callable[[Item], Started], ahead: int = 1) -> Iterator[Started]:
    """Yield start(item) of each item, after start was called for the next `ahead` items too.

    >>> list(started_ahead("abc", str.upper))
    ['A', 'B', 'C']
    """
    waiting: deque[Started] = deque()
    for item in items:
        waiting.append(start(item))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _run_workers(items: Dataset[Item], start: int, stop: int, workers: int, pin: bool) -> Generator[Item, None, None]:
    parent_alive, our_end = multiprocessing.Pipe(duplex=False)
    with _signals_blocked(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than CPUs is allowed
        loader = DataLoader(
            _Shared(items),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            prefetch_factor=PREFETCH,
            # fork copies locks held by other threads and can deadlock. A SIGTERM to the process group ends a fork
            # server. spawn costs one import of torch per worker.
            multiprocessing_context="spawn",
            worker_init_fn=functools.partial(_start_worker, parent_alive),
            pin_memory=pin,
            generator=torch.Generator(),  # the global random state must not depend on the workers
        )
        threads = set(threading.enumerate())
        iterator = iter(loader)
        feeders = set(threading.enumerate()) - threads  # they send the numbers to the workers
    parent_alive.close()
    try:
        for item in iterator:
            if isinstance(item, UserError):
                raise item
            yield item
    finally:
        our_end.close()
        del iterator  # ends the workers
        # A feeder deletes the semaphores of its queue. If Python exited before, the resource tracker would warn.
        for feeder in feeders:
            feeder.join(_FEEDER_SECONDS)


class _Shared(Dataset[Item]):
    """A dataset pickled once into shared memory and unpickled on first use.

    Pickled by DataLoader, a list of a million files would be sent to one starting worker after another.
    """

    def __init__(self, items: Dataset[Item]) -> None:
        self._pickled = torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8)
        self._items: Dataset[Item] | None = None

    def __getitem__(self, number: int) -> Item:
        if self._items is None:
            self._items = pickle.loads(self._pickled.numpy().tobytes())
            self._pickled = torch.empty(0, dtype=torch.uint8)
        assert self._items is not None
        try:
            return self._items[number]
        except UserError as error:
            return UserError(str(error))  # type: ignore[return-value]  # raised by the parent


def _start_worker(parent_alive: Connection, _: int) -> None:
    """Ignore stop signals, and end when the parent closes the pipe or dies."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent_alive,), daemon=True, name="snclr-parent").start()
    # A thread that is sending an item while Python finalizes would abort the process: exit without finalizing.
    atexit.register(os._exit, 0)


def _end_with_parent(parent_alive: Connection) -> None:
    """End a worker without its parent even within an item; torch's own check runs only between items."""
    with contextlib.suppress(OSError):
        parent_alive.poll(None)  # returns at the end of the pipe; nothing is ever sent
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes with stop signals blocked, so that none arrives before they are ignored."""
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
