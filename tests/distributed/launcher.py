"""Start a program on several gloo ranks: by torchrun, or forked with the environment variables of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.reliability.fork_server import ONE_THREAD, ForkedProcess, shared_fork_server

HANG_SECONDS = 280.0
"""Seconds after which a job counts as hung, even on a busy machine."""
_GRACE_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL for the other ranks when one has failed, as in torchrun."""


def torchrun(ranks: int, *arguments: str, timeout: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` (a script, or -m and a module) by torchrun until the last rank has ended."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, env=os.environ | ONE_THREAD, text=True, capture_output=True, timeout=timeout)


def run(
    ranks: int, *arguments: str, cwd: Path | None = None, timeout: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` on forked ranks to the end, which is much faster than torchrun.

    The ranks get torchrun's environment variables and a store. If one fails, the others are ended, and the exit code is
    that of the first to fail.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    variables = [_variables(rank, ranks, store.port) for rank in range(ranks)] if ranks > 1 else [{}]
    return run_processes(variables, *arguments, cwd=cwd, timeout=timeout)


def run_processes(
    variables: Sequence[dict[str, str]], *arguments: str, cwd: Path | None = None, timeout: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` once for each set of environment variables, all at the same time, to the end."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        processes = [start(*arguments, output=output, errors=errors, env=own, cwd=cwd) for own in variables]
        code = _wait_for_all(processes, time.monotonic() + timeout)
        stdout, stderr = output.read_text(), errors.read_text()
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, stdout, stderr)
    return subprocess.CompletedProcess(list(arguments), code, stdout, stderr)


def start(
    *arguments: str, output: Path, errors: Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> ForkedProcess:
    """Start `python *arguments` in its own session, with `env` added to the environment of this process."""
    return shared_fork_server().start(
        list(arguments), python=True, output=str(output), errors=str(errors), cwd=str(cwd or Path.cwd()),
        env={**os.environ, **ONE_THREAD, **(env or {})},
    )  # fmt: skip


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    same = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in {**same, "RANK": rank, "LOCAL_RANK": rank}.items()}


def _wait_for_all(processes: Sequence[ForkedProcess], deadline: float) -> int | None:
    """Wait until all have ended; return the exit code of the first that failed, 0, or None after the deadline."""
    failed: int | None = None
    late = False
    while running := [process for process in processes if process.returncode is None]:
        for process in running:
            if process.poll() and failed is None:
                failed = process.returncode
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                for other in processes:
                    other.send_signal(signal.SIGTERM)
        if time.monotonic() > deadline:
            late = failed is None
            for process in running:
                process.send_signal(signal.SIGKILL, group=True)
        time.sleep(0.02)
    return None if late else failed or 0


def snclr(ranks: int, *arguments: object, timeout: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run the command line of the package on forked ranks; it must succeed."""
    done = run(ranks, "-m", "snclr", *(str(argument) for argument in arguments), timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
