"""Compute numbered items ahead of their use: in a thread, or in worker processes that outlive signals but not us."""

from __future__ import annotations

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
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from snclr.data.patience import STOPS
from snclr.errors import UserError

Item = TypeVar("Item")

_AHEAD = 2  # items that are ready, or nearly, when one is asked for (for each worker)
_GRACE_SECONDS = 1.0  # for a worker to end by itself when it is not needed any more


def in_thread(items: Dataset[Item], start: int, stop: int) -> Iterator[Item]:
    """Yield items start … stop - 1, computed by one thread a little ahead."""
    ahead: deque[Future[Item]] = deque()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snclr-views")
    try:
        for number in range(start, stop):
            ahead.append(pool.submit(items.__getitem__, number))
            if len(ahead) > _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_processes(items: Dataset[Item], start: int, stop: int, *, workers: int, pin: bool = False) -> Iterator[Item]:
    """Yield items start … stop - 1 from worker processes; these end with this iterator, at exit, or when we die.

    `items` is sent to the workers whole. `pin` puts what has a `pin_memory` method into memory a GPU copies fast.
    """
    running = _run_workers(items, start, stop, workers, pin)
    # At exit Python would send SIGTERM to the workers and wait; they ignore it, so they must be told to stop before.
    atexit.register(running.close)
    unregister = atexit.unregister  # by a name of its own: an iterator left open ends after the modules' names are gone
    try:
        yield from running
    finally:
        running.close()
        unregister(running.close)


def _run_workers(items: Dataset[Item], start: int, stop: int, workers: int, pin: bool) -> Generator[Item, None, None]:
    leash, our_end = multiprocessing.Pipe(duplex=False)
    with _signals_blocked(), warnings.catch_warnings():
        # The number of workers is the caller's choice, also above the number of processors.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Parcel(items),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            prefetch_factor=_AHEAD,
            # fork would copy the locks that other threads hold (it hangs, and Python warns of it); a fork server dies
            # of a SIGTERM to the process group. A spawned worker costs one import of torch, once a run.
            multiprocessing_context="spawn",
            worker_init_fn=functools.partial(_start_worker, leash),
            pin_memory=pin,
            generator=torch.Generator(),  # its own: the program's random state must not depend on the workers
        )
        iterator = iter(loader)
    leash.close()
    try:
        for item in iterator:
            if isinstance(item, _Refusal):
                raise UserError(item.message)
            yield item
    finally:
        our_end.close()
        del iterator  # ends the workers


class _Parcel(Dataset[Item]):
    """Items on their way to the workers: packed once (torch shares a tensor's memory), unpacked at first use.

    Sent as they are, a list of a million files would go to one worker after the other, each while it still starts up.
    """

    def __init__(self, items: Dataset[Item]) -> None:
        self._packed = torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8)
        self._items: Dataset[Item] | None = None

    def __getitem__(self, number: int) -> Item:
        if self._items is None:
            self._items = pickle.loads(self._packed.numpy().tobytes())
            self._packed = torch.empty(0, dtype=torch.uint8)
        assert self._items is not None
        try:
            return self._items[number]
        except UserError as error:  # raised here it would reach a person with the worker's traceback around it
            return _Refusal(str(error))  # type: ignore[return-value]


@dataclass
class _Refusal:
    """A UserError on its way to the parent, which raises it."""

    message: str


def _start_worker(leash: Connection, _: int) -> None:
    """Make a worker leave the signals of a stop to the parent, which decides, and end with the parent's interest."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(leash,), daemon=True, name="snclr-leash").start()
    # Its threads (the leash, the queue's that may be sending an item nobody wants) must not wake up while Python ends:
    # that would abort the process. Nothing of it is needed any more: it ends at once.
    atexit.register(os._exit, 0)


def _end_with(leash: Connection) -> None:
    """End a worker whose parent has let go or has died, also in the middle of an item: it may wait for a network.

    torch's own messages are seen between two items only. What a worker writes to the cache is whole or not there.
    """
    with contextlib.suppress(OSError):
        leash.poll(None)  # nothing is ever sent: what can be read is the end
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes that have the signals of a stop blocked from their first moment; ours arrive when this ends."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it later would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
