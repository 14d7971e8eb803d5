"""Waiting for a network that is away: for minutes, since a run is worth more than a wait, and never against a stop."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, TracebackType
from typing import Any, TypeVar

from snclr.errors import UserError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

ATTEMPTS = 5
PAUSE_SECONDS = 1.0  # before the second attempt; twice as long before each further one
MAX_PAUSE_SECONDS = 30.0
PATIENCE_SECONDS = 540.0
"""Below a run's --timeout (600): of several machines, the one that cannot read says so before the others give it up."""

STOPS = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}
"""What asks a run to stop; Windows has no SIGUSR1."""

_log = logging.getLogger(__name__)
_VARIABLE = "SNCLR_NETWORK_PATIENCE"


class Passing(Exception):
    """A fault that may be gone at the next attempt; a few are made."""


class Away(Passing):
    """The network or the server is away for now: attempts are made for as long as the patience lasts."""

    progressed = False
    """Whether more of a file came than ever before: then the patience begins anew."""


class Stopped(BaseException):
    """A stop was asked for while something was waited for: like KeyboardInterrupt, no error that code may handle."""


def network_patience() -> float:
    """For how many seconds a network may be away: SNCLR_NETWORK_PATIENCE, else nine minutes."""
    given = os.environ.get(_VARIABLE)
    if not given:
        return PATIENCE_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"{_VARIABLE} is {given!r}; give a number of seconds of at least 0, such as 600")
    return seconds


def keep_trying(url: str, action: Callable[[], Answer], *, patience: float | None = None) -> Answer:
    """Call until it works. What may pass is tried a few times, an absent network for `patience` seconds."""
    patience = network_patience() if patience is None else patience
    with _Wait(url, patience) as wait:
        while True:
            try:
                return action()
            except Away as error:
                wait.after_absence(error)
            except Passing as error:
                wait.after_fault(error)


class _Wait:
    """The pauses between the attempts of one action, and what is said of them."""

    def __init__(self, url: str, patience: float) -> None:
        self._url, self._patience = url, patience
        self._faults, self._absences, self._since = 0, 0, math.inf
        self._said = False

    def __enter__(self) -> _Wait:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._said:
            with _lock:
                _waiting.discard(self)
            if kind is None:
                _say(f"{self._url} can be read again")

    def after_fault(self, error: Passing) -> None:
        self._faults += 1
        if self._faults >= ATTEMPTS:
            raise UserError(f"{self._url} could not be read in {ATTEMPTS} attempts: {error}. {_ADVICE}") from error
        _pause(PAUSE_SECONDS * 2 ** (self._faults - 1))

    def after_absence(self, error: Away) -> None:
        now = time.monotonic()
        if error.progressed or not self._absences:
            self._absences, self._since = 0, now
        left = self._since + self._patience - now
        if left <= 0:
            raise UserError(
                f"{self._url} could not be read for {self._patience:g} seconds ({_VARIABLE}): {error}. {_ADVICE}"
            ) from error
        # A first fault is nothing: it is said when the second attempt fails too.
        if self._absences and not self._said:
            self._said = True
            with _lock:
                first = not _waiting
                _waiting.add(self)
            if first:
                _say(
                    f"warning: {self._url} cannot be read ({error}); waiting for it, at most {self._patience:g} "
                    f"seconds ({_VARIABLE}). It can be stopped and resumed as always."
                )
        self._absences += 1
        _pause(min(PAUSE_SECONDS * 2 ** min(self._absences - 1, 20), MAX_PAUSE_SECONDS, left))


_ADVICE = (
    "Check the connection and the address, and run the same command again (a run with --resume); what was fetched "
    "before is kept."
)
_lock = threading.Lock()
_waiting: set[_Wait] = set()  # so that sixteen threads that wait for one network say so once
_over = threading.Event()


def _pause(seconds: float) -> None:
    if _over.wait(seconds):
        raise UserError("another request failed, or was interrupted")


def _say(text: str) -> None:
    """To the person, and to a run's log; a worker process has no log."""
    print(text, file=sys.stderr, flush=True)
    _log.info(text)


def map_in_threads(action: Callable[[Any], Answer], items: Iterable[Any], threads: int = 16) -> list[Answer]:
    """Call for each item, some at a time; an error of one, or Ctrl-C, also ends the waits of the others."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            return list(pool.map(action, items))
        except BaseException:
            _over.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            _over.clear()


def until_stopped(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items; a stop ends the wait for the next one at once: Stopped.

    In a run the handlers of signals only note that a stop was asked for, which the loop sees when it has its batch. For
    as long as this iterator lives they are still called, and then the wait is left. Where a signal would end the
    process anyway nothing is changed, nor off the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from items
        return
    with _Handlers() as handlers:
        while True:
            handlers.waiting = True
            try:
                handlers.leave_if_asked()
                item = next(items)
            except StopIteration:
                return
            finally:
                handlers.waiting = False
            yield item


class _Handlers:
    """Handlers of stops that call those they replace and then, while something is waited for, raise Stopped."""

    def __init__(self) -> None:
        self.waiting = False
        self._asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def leave_if_asked(self) -> None:
        """Raise where a stop has come, also one that came before the wait."""
        if self._asked is not None and self.waiting:
            self.waiting = False
            raise Stopped(self._asked.name)

    def __enter__(self) -> _Handlers:
        for number in STOPS:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                self._before[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:  # else someone has put back what was there before us both
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        number = signal.Signals(signum)
        self._before[number](signum, frame)
        self._asked = number
        self.leave_if_asked()
