"""Graceful stops: SIGINT (Ctrl-C), SIGTERM (Kubernetes, SLURM) and SIGUSR1 (SLURM's early warning) set a flag."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from snclr.runtime.early_interrupt import exit_at_once, write_interrupted
from snclr.runtime.progress import show_notice

Item = TypeVar("Item")

STOP_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
"""Signals that request a stop, with the exit codes. SIGUSR1 announces the SIGTERM of a preemption, so both have the
exit code on which a job script requeues."""
_PR_SET_PDEATHSIG = 1

STARTED_BY = "SNCLR_STARTED_BY"
"""Environment variable with the id of the process that started this rank for --devices."""


def rank_exit_code(code: int) -> int:
    """Return a command's exit code for this process: 0 for a stopped rank that Fabric started.

    Rank 0 reports 143 or 130 for the job. Fabric kills rank 0 if another rank exits with any code but 0.
    """
    started_by_fabric = os.environ.get(STARTED_BY) == str(os.getppid())
    return 0 if started_by_fabric and code in (130, 143) else code


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies (Linux only).

    Ranks then stop and save when their torchrun agent is killed. Elsewhere they end at the next failed collective.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def command_signals() -> Iterator[None]:
    """Within the block, SIGUSR1 ends the process like SIGTERM, and Ctrl-C during an import exits at once.

    Handlers that are not Python's defaults or the program's own stay, e.g. a SIGINT that is ignored in the background
    jobs of a script.
    """
    replaced: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            replaced[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, exit_at_once):
            replaced[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit with 130 if the main thread is importing a module.

    C++ code in numpy and torch discards a KeyboardInterrupt during their import and continues with half a module.
    Exiting without cleanup is safe: every file is written so that a kill leaves it intact.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            write_interrupted()
            os._exit(rank_exit_code(130))
        frame = frame.f_back
    raise KeyboardInterrupt


class StopRequested(BaseException):
    """A job ended early because of a signal, after saving its state; the same call continues it.

    Like KeyboardInterrupt it is no Exception: a signal handler may raise it inside code that handles errors.
    """

    def __init__(self, signum: int, step: int | None = None, total_steps: int | None = None) -> None:
        self.signal = signal.Signals(signum)
        self.step, self.total_steps = step, total_steps
        super().__init__(self.signal, step, total_steps)

    def __str__(self) -> str:
        return self.signal.name if self.step is None else f"{self.signal.name} after step {self.step}"

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM and SIGUSR1."""
        return STOP_SIGNALS[self.signal]


class StopFlag:
    """Within the block, SIGINT, SIGTERM and SIGUSR1 only set `requested`, which the training loop checks each step.

    A second Ctrl-C raises KeyboardInterrupt at once, except under torchrun, which forwards the terminal's signal. Off
    the main thread the block changes nothing (Python allows no handlers there). A SIGINT that was ignored on entry
    stays ignored, as for background jobs of a script. In a forked child the handlers do nothing, so that data workers
    survive a signal to the process group.

    >>> with StopFlag() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     print(stop.requested.name)
    SIGTERM
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        """The first signal received."""
        self.interrupts_wait = False
        """Whether a signal raises StopRequested at once; set by `until_stopped`."""
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def request(self, signum: int) -> None:
        """Request a stop as if this process had received the signal, e.g. because another rank did."""
        self.requested = self.requested or signal.Signals(signum)

    def __enter__(self) -> "StopFlag":
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            _active_flags.append(self)
            for number in STOP_SIGNALS:
                if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self in _active_flags:
            _active_flags.remove(self)
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python, so it cannot be restored.
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
            if self._interrupts == 1 and os.isatty(2) and STARTED_BY not in os.environ:  # a step can take a minute
                text = "stopping: saving first; press Ctrl-C again to stop at once"
                if not show_notice(text):
                    os.write(2, f"\n{text}\n".encode())
        if self.interrupts_wait:
            self.interrupts_wait = False
            raise StopRequested(signum)


_active_flags: list[StopFlag] = []
"""The flags whose blocks the main thread is in; the last one receives the signals."""


def until_stopped(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items; a stop signal to the innermost StopFlag interrupts the wait for the next one with StopRequested.

    Without a StopFlag, or off the main thread, signals do not change the iteration.
    """
    if not _active_flags or threading.current_thread() is not threading.main_thread():
        yield from items
        return
    flag = _active_flags[-1]
    while True:
        flag.interrupts_wait = True
        try:
            if flag.requested is not None:  # it arrived between two items
                raise StopRequested(flag.requested)
            item = next(items)
        except StopIteration:
            return
        finally:
            flag.interrupts_wait = False
        yield item
