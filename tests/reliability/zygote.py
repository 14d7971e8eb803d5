"""A process that has loaded torch and snclr, and forks a command for each line it is sent.

Loading takes seconds and a tiny run takes one: so a hundred killed runs fit in minutes. Each command is a process of
its own, in a session of its own, that goes through `snclr.cli.main.main` and the interpreter's own exit like any other.

    {"run": [arguments], "output": path, …} → pid      {"poll": pid} → exit code, or null

The arguments are those of `snclr`, or with "python": true those of `python` (a script, or -m and a module). It may have
"errors" (a file of their own), "env" (all of it), "cwd" and "faults" ([{"name": …}], of `inject`), too.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
}  # fmt: skip
ALONE = {**os.environ, **ONE_THREAD}


class Zygote:
    """Such a process; `close` ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ALONE,
        )  # fmt: skip
        self._answer()

    def ask(self, order: dict[str, Any]) -> Any:
        """Send one line and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote has died"
        return json.loads(line)

    def close(self, timeout: float = 60) -> None:
        """The end of its input is its end."""
        self._process.communicate(timeout=timeout)


def serve() -> dict[str, Any] | None:
    """Answer lines until the end of the input; in a forked child, return its order."""
    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            pid = os.fork()
            if pid == 0:
                return order
            answer: int | None = pid
        else:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)
    return None


def become(order: dict[str, Any]) -> int:
    """Be the command: own session, own output file, the faults that are to happen."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = _open(order["output"])
    errors = _open(order["errors"]) if "errors" in order else output
    for fd, copy in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(fd, copy)
    if "env" in order:
        os.environ.clear()
        os.environ.update(order["env"])
    if "cwd" in order:
        os.chdir(order["cwd"])
    from tests.reliability import inject

    for fault in order.get("faults", ()):
        getattr(inject, fault.pop("name"))(**fault)
    if not order.get("python"):
        from snclr.cli.main import main

        return main(order["run"])
    if order["run"][0] == "-m":
        sys.argv = order["run"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = order["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


if __name__ == "__main__":
    import timm  # noqa: F401
    import torchvision  # noqa: F401

    import snclr.cli.evaluate
    import snclr.cli.pretrain
    import snclr.evaluation.session
    import snclr.train.pretrain  # noqa: F401

    print(json.dumps(os.getpid()), flush=True)
    todo = serve()
    sys.exit(0 if todo is None else become(todo))
