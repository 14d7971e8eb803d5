"""Start a script on several gloo processes by torchrun, as a user would, or alone."""

import os
import subprocess
import sys
from pathlib import Path

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}


def torchrun(processes: int, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs `arguments` (a script, or -m and a module) on so many processes; 1 is without it."""
    if processes == 1:
        return [sys.executable, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, *options, *arguments]


def run(
    processes: int, *arguments: str, cwd: Path | None = None, options: tuple[str, ...] = (), timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run to the end and give back what was printed."""
    return subprocess.run(
        torchrun(processes, *arguments, options=options), cwd=cwd, env=os.environ | _ENVIRONMENT, text=True,
        capture_output=True, timeout=timeout,
    )  # fmt: skip


def snclr(processes: int, *arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command line of the package on so many processes; it must succeed."""
    done = run(processes, "-m", "snclr", *(str(argument) for argument in arguments), timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
