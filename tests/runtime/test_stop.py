"""Stop signals set a flag."""

from __future__ import annotations

import contextlib
import os
import pickle
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snclr.runtime.stop import StopFlag, StopRequested, until_stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def known_handlers() -> Iterator[None]:
    """Install Python's own handlers, even if the tests run as a background job with SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_recorded(number: signal.Signals) -> None:
    with StopFlag() as stop:
        assert stop.requested is None
        for later in (number, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(later)
            assert stop.requested is number
    assert stop.requested is number


def test_a_second_interrupt_stops_at_once() -> None:
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_under_torchrun_a_second_interrupt_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested is signal.SIGINT


def test_handlers_are_restored_after_an_error() -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(RuntimeError), StopFlag():
        assert signal.getsignal(signal.SIGTERM) is not mine
        raise RuntimeError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_blocks_nest() -> None:
    with StopFlag() as outer:
        with StopFlag() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (inner.requested, outer.requested) == (signal.SIGTERM, None)
        signal.raise_signal(signal.SIGUSR1)
        assert outer.requested is signal.SIGUSR1


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested is signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_off_the_main_thread_it_changes_nothing() -> None:
    seen: list[object] = []

    def run() -> None:
        with StopFlag() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_a_stop_can_be_requested_without_a_signal() -> None:
    stop = StopFlag()
    stop.request(int(signal.SIGUSR1))
    stop.request(signal.SIGINT)
    assert stop.requested is signal.SIGUSR1


def test_a_stop_signal_interrupts_a_wait() -> None:
    def items() -> Iterator[int]:
        yield 1
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        time.sleep(100)
        yield 2

    with StopFlag() as stop:
        stoppable = until_stopped(items())
        assert next(stoppable) == 1
        with pytest.raises(StopRequested):
            next(stoppable)
        assert stop.requested is signal.SIGUSR1
    with StopFlag():  # a signal between two items ends the next wait at once
        stoppable = until_stopped(iter([1, 2]))
        assert next(stoppable) == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopRequested):
            next(stoppable)
    with StopFlag():  # earlier signals do not matter
        assert list(until_stopped(iter([1, 2]))) == [1, 2]
    assert list(until_stopped(iter([1, 2]))) == [1, 2]


def test_a_forked_child_survives_the_signals() -> None:
    script = """
import os, signal, sys
from snclr.runtime.stop import StopFlag
signal.signal(signal.SIGINT, signal.default_int_handler)
with StopFlag() as stop:
    child = os.fork()
    if child == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        os._exit(5 if stop.requested is None else 6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(stop.requested)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=280).returncode == signal.SIGTERM


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_stop_requested_has_the_exit_code_of_its_signal(signum, code):
    error = pickle.loads(pickle.dumps(StopRequested(signum, step=3, total_steps=9)))
    assert (error.signal, error.exit_code, error.step, error.total_steps) == (signum, code, 3, 9)
    assert not isinstance(error, Exception)


def test_ctrl_c_at_the_end_of_the_program_keeps_its_exit_code(tmp_path: Path) -> None:
    """Python resets the handler of SIGINT before it deletes its modules."""
    program = tmp_path / "snclr"
    program.write_text(
        "import os, signal, sys\n"
        "import snclr\n"
        "from snclr.runtime.stop import command_signals\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):\n"
        "        kill(pid, number)\n"
        "sys.late = Late()\n"
        "with command_signals():\n"
        "    pass\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_interrupted_replaces_the_status_line_on_a_terminal() -> None:
    parent, terminal = pty.openpty()
    code = "from snclr.runtime.early_interrupt import write_interrupted as w; import os; os.write(2, b'starting'); w()"
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, env=environment)
    assert os.read(parent, 1000).endswith(b"\r\x1b[K\x1b[?25hinterrupted\r\n")
    os.close(parent)
    os.close(terminal)


def test_the_first_interrupt_is_answered_on_a_terminal() -> None:
    parent, terminal = pty.openpty()
    code = (
        "import signal; from snclr.runtime.stop import StopFlag\n"
        "with StopFlag(): signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGTERM)"
    )
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True)
    assert os.read(parent, 1000) == b"\r\nstopping: saving first; press Ctrl-C again to stop at once\r\n"
    os.close(parent)
    os.close(terminal)
