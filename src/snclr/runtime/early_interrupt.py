"""Ctrl-C in the first moments of the `snclr` program, before its `main` runs: exit with 130, without a traceback.

The package imports this module first. It changes nothing in other programs that import snclr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def exit_on_interrupt() -> None:
    """Handle Ctrl-C until `command_signals` takes over, if this process is the `snclr` program."""
    if is_program(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)


def exit_at_once(signum: int, frame: FrameType | None) -> None:
    """Exit with 130; nothing has been written yet."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def is_program(command: Sequence[str]) -> bool:
    """Return whether a command line starts snclr: its script, or `python -m snclr`.

    >>> is_program(["python", "/usr/bin/snclr", "knn"]), is_program(["python", "-X", "dev", "-m", "snclr"])
    (True, True)
    >>> is_program(["python", "train.py", "snclr"]), is_program(["python", "-c", "import snclr"])
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
