"""A fork server: a process with torch and snclr imported that forks a child for each command.

Importing takes seconds and a tiny run takes one second. Each command is a process in its own session that runs
`snclr.cli.main.main` and exits as usual. Requests and responses are lines of JSON:

    {"run": [arguments], "output": path, …} → pid      {"poll": pid} → exit code, or null while it runs

The arguments are those of `snclr`, or with "python": true those of `python` (a script, or -m and a module). Optional
keys: "errors" (path for stderr), "env" (the whole environment), "cwd", "faults" ([{"name": …}], see `inject.py`).
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

import snclr

ROOT = Path(__file__).parents[2]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
}  # fmt: skip
ENVIRONMENT = {**os.environ, **ONE_THREAD}


class ForkedProcess:
    """A child of the fork server, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it), or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.request({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to its process group, if it still runs."""
        if self.poll() is None:
            (os.killpg if group else os.kill)(self.pid, number)


class ForkServer:
    """A running fork server; `close` ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.fork_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT,
        )  # fmt: skip
        self._read_response()

    def start(self, arguments: list[str], **options: Any) -> ForkedProcess:
        """Start a command; the options are the keys of a request."""
        return ForkedProcess(self, self.request({"run": arguments, **options}))

    def request(self, request: dict[str, Any]) -> Any:
        """Send one request and return the response."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read_response()

    def _read_response(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server has died"
        return json.loads(line)

    def close(self, timeout: float = 290) -> None:
        """Close its input, which ends it."""
        self._process.communicate(timeout=timeout)


@functools.cache
def shared_fork_server() -> ForkServer:
    """Return the fork server of this process, started on first use."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def serve() -> dict[str, Any] | None:
    """Respond to requests until the input ends; in a forked child, return the request to run."""
    for line in sys.stdin:
        request = json.loads(line)
        if "run" in request:
            pid = os.fork()
            if pid == 0:
                return request
            response: int | None = pid
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            response = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(response), flush=True)
    return None


def run_command(request: dict[str, Any]) -> int:
    """Run the command in this process, in its own session, with its output file, environment and faults."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = _open(request["output"])
    errors = _open(request["errors"]) if "errors" in request else output
    for fd, copy in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(fd, copy)
    if "env" in request:
        os.environ.clear()
        os.environ.update(request["env"])
    if "cwd" in request:
        os.chdir(request["cwd"])
    from tests.reliability import inject

    for fault in request.get("faults", ()):
        getattr(inject, fault.pop("name"))(**fault)
    if not request.get("python"):
        from snclr.cli.main import main

        return main(request["run"])
    if request["run"][0] == "-m":
        sys.argv = request["run"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def import_everything() -> None:
    """Import all modules of snclr and the libraries that its commands import on first use. This starts no thread.

    Then freeze them, so that the garbage collector of a child does not visit them: without that, the exit of a child
    takes longer than most commands.
    """
    sys.modules["triton"] = None  # type: ignore[assignment]  # torchvision imports it; frozen, it reports leaks at exit
    for library in ("lightning_fabric", "pycocotools.mask", "tensorboardX", "timm", "torchvision"):
        importlib.import_module(library)
    for module in pkgutil.walk_packages(snclr.__path__, "snclr."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    Image.init()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    import_everything()
    print(json.dumps(os.getpid()), flush=True)
    command = serve()
    sys.exit(0 if command is None else run_command(command))
