"""Stopping in good order: Ctrl-C, SIGTERM (Kubernetes, SLURM) and SIGUSR1 (SLURM's early warning) only set a flag."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
"""SIGUSR1 comes minutes before the SIGTERM of a pre-emption and means the same, so a job script needs one code to
requeue on: 143, "stopped by the scheduler, resumable"; 130 is "stopped by a person"."""


STARTED_BY = "SNCLR_STARTED_BY"
"""The variable that tells a process which other one started it for --devices."""


def code_of_this_process(code: int) -> int:
    """The exit code of a command in this process: 0 where Fabric started it and it was stopped in good order.

    The first process says 143 or 130 for all. Fabric answers any code but 0 of the others by killing the first, which
    may be about to end by itself.
    """
    helper = os.environ.get(STARTED_BY) == str(os.getppid())
    return 0 if helper and code in (130, 143) else code


@contextmanager
def early_warning_ends() -> Iterator[None]:
    """Within the block SIGUSR1 ends the process as SIGTERM does, where it would end it otherwise: outside StopRequest.

    It is the same stop, so it has the same code also while there is nothing to save yet.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class StopRequest:
    """Within the block the three signals only note that a stop was asked for; the loop looks at `requested` each step.

    A second Ctrl-C raises KeyboardInterrupt at once, except under torchrun: there one comes from the terminal and one
    from the launcher, which is nobody's impatience. Off the main thread the block changes nothing (Python allows no
    handlers there). A SIGINT that was ignored on entry stays ignored: a script's background job is not the terminal's.
    In a forked child the handlers do nothing, so that data workers outlive the signal sent to the whole group.

    >>> with StopRequest() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     print(stop.requested.name, stop.exit_code)
    SIGTERM 143
    """

    def __init__(self) -> None:
        self._requested: signal.Signals | None = None
        self._interrupts = 0
        self._owner = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> signal.Signals | None:
        """The first signal that came, or None."""
        return self._requested

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM or SIGUSR1, 0 where no stop was asked for."""
        return 0 if self._requested is None else _EXIT_CODES[self._requested]

    def request(self, signum: int) -> None:
        """Ask for a stop as if the signal had come, e.g. because it came to another rank."""
        number = signal.Signals(signum)
        assert number in _EXIT_CODES, number
        self._requested = self._requested or number

    def __enter__(self) -> StopRequest:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        self.request(signum)
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise KeyboardInterrupt
