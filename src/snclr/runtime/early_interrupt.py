"""Ctrl-C while the `snclr` program still imports its modules: exit with 130, without a traceback.

The package imports this module first. Other programs that import snclr keep their own handling of Ctrl-C. The end of
the program is covered too: it exits without deleting its modules, which takes seconds with torch on a busy machine.
"""

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def exit_on_interrupt() -> None:
    """Handle Ctrl-C until `runtime.stop.command_signals` does, if this process is the `snclr` program."""
    if is_snclr_program(sys.orig_argv):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, exit_at_once)
        atexit.register(_end)  # registered first, so it runs last


_exit_code: int | None = None


def end_quickly(code: int) -> None:
    """Have the `snclr` program exit with this code once the functions registered with `atexit` have run."""
    global _exit_code
    _exit_code = code


def _end() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the result is complete: keep its exit code
    if _exit_code is not None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            return  # Python reports a closed pipe
        os._exit(_exit_code)


def exit_at_once(signum: int, frame: FrameType | None) -> None:
    """Exit with 130; nothing has been written yet, or everything has."""
    write_interrupted()
    os._exit(130)


def write_interrupted() -> None:
    """Write "interrupted" to stderr; on a terminal in place of the status line, and with the cursor shown again."""
    clear = b"\r\x1b[K\x1b[?25h" if os.isatty(2) and os.environ.get("TERM") != "dumb" else b""
    os.write(2, clear + b"interrupted\n")


def is_snclr_program(command: Sequence[str]) -> bool:
    """Return whether a command line starts snclr: its script, or `python -m snclr`.

    >>> is_snclr_program(["python", "/usr/bin/snclr", "knn"]), is_snclr_program(["python", "-m", "snclr"])
    (True, True)
    >>> is_snclr_program(["python", "-X", "dev", "-m", "snclr"])
    True
    >>> is_snclr_program(["python", "train.py", "snclr"]), is_snclr_program(["python", "-c", "import snclr"])
    (False, False)
    """
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-X", "-W"):  # followed by a value
            next(arguments, None)
        elif argument == "-m":
            return next(arguments, "") == "snclr"
        elif not argument.startswith("-") or argument == "-c":
            return os.path.basename(argument) == "snclr"
    return False
