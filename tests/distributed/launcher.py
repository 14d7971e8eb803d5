"""Start a program on several gloo processes: by torchrun, as a user would, or in a moment, as torchrun would."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.reliability.fork_server import ONE_THREAD, ForkServer

_GRACE_SECONDS = 30.0
"""What torchrun gives the others when one of its processes has failed."""


@functools.cache
def _fork_server() -> ForkServer:
    """One for all tests of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def torchrun(processes: int, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` (a script, or -m and a module) by torchrun to the end, and give back what was printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, env=os.environ | ONE_THREAD, text=True, capture_output=True, timeout=timeout)


def run(
    processes: int, *arguments: str, cwd: Path | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The same without torchrun, whose start and imports take longer than most of what is tried.

    The processes are forked from one that has torch loaded, with torchrun's variables and a store like its own; where
    one fails the others are ended. The code is that of the first to fail.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        order = {
            "run": list(arguments), "python": True, "output": str(output), "errors": str(errors),
            "cwd": str(cwd or Path.cwd()),
        }  # fmt: skip
        variables = [_variables(rank, processes, store.port) for rank in range(processes)] if processes > 1 else [{}]
        pids = [_fork_server().request({**order, "env": {**os.environ, **ONE_THREAD, **own}}) for own in variables]
        code = _wait_for_all(pids, time.monotonic() + timeout)
        printed, said = output.read_text(), errors.read_text()
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, printed, said)
    return subprocess.CompletedProcess(list(arguments), code, printed, said)


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    same = {
        "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in {**same, "RANK": rank, "LOCAL_RANK": rank}.items()}


def _wait_for_all(pids: list[int], deadline: float) -> int | None:
    """The code of the first that failed, 0 where none did, None where they did not end in time; none is left."""
    codes: dict[int, int] = {}
    failed: int | None = None
    late = False
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            code: Any = _fork_server().request({"poll": pid})
            if code is not None:
                codes[pid] = code
                if code and failed is None:
                    failed = code
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                    _signal(pids, codes, signal.SIGTERM)
        if time.monotonic() > deadline:
            late = failed is None
            _signal(pids, codes, signal.SIGKILL)
        time.sleep(0.02)
    return None if late else failed or 0


def _signal(pids: list[int], ended: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        if pid not in ended:  # a process group of its own, with its loader's workers
            (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def snclr(processes: int, *arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command line of the package on so many processes; it must succeed."""
    done = run(processes, "-m", "snclr", *(str(argument) for argument in arguments), timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
