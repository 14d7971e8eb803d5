"""Interruptible retries with backoff for remote reads."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from snclr.errors import UserError
from snclr.runtime.stop import StopRequested

Item = TypeVar("Item")
Result = TypeVar("Result")

BACKOFF_SECONDS = 1.0  # before the second attempt, doubled for each further one
MAX_BACKOFF_SECONDS = 30.0
PROGRESS_SECONDS = 90.0  # a longer attempt has received data: connections without a byte end after 30 seconds
NETWORK_TIMEOUT_SECONDS = 540.0
"""Below the distributed timeout (600): the rank that cannot read reports its error before the others time out."""

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""Signals that request a stop."""

_log = logging.getLogger(__name__)
_VARIABLE = "SNCLR_NETWORK_TIMEOUT"
_cancelled = threading.Event()
_THREADS = 16


class TransientError(Exception):
    """A failure of the network or the server, which is retried until the network timeout."""


def network_timeout() -> float:
    """Return the seconds a network may be unavailable: SNCLR_NETWORK_TIMEOUT, default 540."""
    value = os.environ.get(_VARIABLE) or NETWORK_TIMEOUT_SECONDS
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < math.inf:
            return float(value)
    raise UserError(f"{_VARIABLE} is {value!r}; give a number of seconds of at least 0, such as 600")


def retry(url: str, action: Callable[[], Result], *, timeout: float | None = None) -> Result:
    """Call `action` until it succeeds; transient errors are retried for `timeout` seconds without progress."""
    timeout = network_timeout() if timeout is None else timeout
    failures, outage_start = 0, 0.0
    while True:
        attempt_start = time.monotonic()
        try:
            return action()
        except TransientError as error:
            now = time.monotonic()
            if failures == 0 or now - attempt_start > PROGRESS_SECONDS:
                failures, outage_start = 0, now
            left = outage_start + timeout - now
            if left <= 0:
                raise UserError(
                    f"{url} could not be read for {timeout:g} seconds ({_VARIABLE}): {error}. Check the connection and "
                    "the URL, then run the same command again (a run with --resume)."
                ) from error
            failures += 1
            if failures == 2:  # single failures are normal
                warning = (
                    f"warning: {url} cannot be read ({error}); retrying for {timeout:g} seconds ({_VARIABLE})."
                    " If the address is wrong, press Ctrl-C"
                )
                print(warning, file=sys.stderr, flush=True)
                _log.info(warning)  # to the run's log; worker processes have none
            if _cancelled.wait(min(BACKOFF_SECONDS * 2 ** min(failures - 1, 10), MAX_BACKOFF_SECONDS, left)):
                raise UserError("another request failed or was interrupted") from error


def map_in_threads(action: Callable[[Any], Result], items: Iterable[Any]) -> list[Result]:
    """Map in a thread pool; the error of one item, or Ctrl-C, also cancels the retries of the others."""
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        try:
            return list(pool.map(action, items))
        except BaseException:
            _cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            _cancelled.clear()


def until_stopped(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items; a stop signal interrupts the wait for the next one with StopRequested.

    During training, signal handlers only set a flag that the loop checks between batches. This iterator wraps those
    handlers: they still run, and then a pending wait is interrupted. Default handlers, which end the process, are not
    wrapped. Off the main thread nothing changes, since Python allows no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from items
        return
    previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
    stop: signal.Signals | None = None
    waiting = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal stop, waiting
        previous[signum](signum, frame)
        stop = signal.Signals(signum)
        if waiting:
            waiting = False
            raise StopRequested(stop)

    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            previous[number] = handler
            signal.signal(number, handle)
    try:
        while True:
            waiting = True
            try:
                if stop is not None:  # it arrived between two items
                    raise StopRequested(stop)
                item = next(items)
            except StopIteration:
                return
            finally:
                waiting = False
            yield item
    finally:
        for signum, handler in previous.items():
            if signal.getsignal(signum) is handle:  # otherwise an outer block has already restored its own handler
                signal.signal(signum, handler)
