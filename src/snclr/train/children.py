"""The other processes of this machine, where no launcher started them: started, watched, and not left behind.

Fabric can start them too, but has this process killed within five seconds of another's end by any code but 0; and 143,
"stopped and saved", is one of those.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time

from snclr.distributed import is_distributed
from snclr.train.processes import PARENT, Processes

ORPHAN_SECONDS = 10.0
"""How long a process may go on without the one that started it; one that trains ends before that (watch.py)."""
BEREFT_SECONDS = 30.0
"""How long this process may go on without one it started: on CPUs the next message fails at once, on GPUs it hangs."""
FAREWELL_SECONDS = 15.0
"""How long they may take to end after this one."""
_LOOK_SECONDS = 0.5
_IN_ORDER = (None, 0, 130, 143)


def join(processes: Processes) -> None:
    """Start the others of this machine, once in a program; in one of those others, follow the one that did."""
    if is_distributed():
        return  # a second job of this program
    if PARENT in os.environ:
        _follow(int(os.environ[PARENT]))
    elif processes.here > 1:
        _start(processes)


def _start(processes: Processes) -> None:
    """Give the same command again, once for each other process."""
    common = {PARENT: str(os.getpid()), "MASTER_ADDR": processes.address, "MASTER_PORT": str(processes.port)}
    children = [
        subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]], env={**os.environ, **common, "LOCAL_RANK": str(local_rank)}
        )
        for local_rank in range(1, processes.here)
    ]
    atexit.register(_see_off, children)
    threading.Thread(target=_watch, args=(children, processes.rank), daemon=True).start()


def _watch(children: list[subprocess.Popen[bytes]], rank: int) -> None:
    """End this process, too, where another has failed and this one waits for it in vain."""
    while True:
        time.sleep(_LOOK_SECONDS)
        for number, child in enumerate(children, rank + 1):
            if child.poll() not in _IN_ORDER:
                time.sleep(BEREFT_SECONDS)  # to end by itself, with a better word
                for other in children:
                    other.kill()
                _end(f"process {number} (pid {child.pid}) ended {_how(child.returncode)}, and all end with it")


def _see_off(children: list[subprocess.Popen[bytes]]) -> None:
    """At the end: they leave at the same time, and one that does not is stuck."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    for child in children:
        try:
            child.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@functools.cache
def _follow(parent: int) -> None:
    """Do not outlive the process that started this one, even where it dies before the two have met."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        time.sleep(ORPHAN_SECONDS)
        _end("the process that started this one is gone, and this one ends too")

    threading.Thread(target=look, daemon=True).start()


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _end(text: str) -> None:
    """Say why and end at once: the main thread may be stuck where no exception reaches it. All files are crash-safe."""
    with contextlib.suppress(OSError):
        print(f"snclr: {text}", file=sys.stderr, flush=True)
    os._exit(1)
