"""A process that has loaded torch and snclr, and forks an `snclr` command for each line it is sent.

Loading takes seconds and a tiny run takes one: so a hundred killed runs fit in minutes. Each command is a process of
its own, in a session of its own, that goes through `snclr.cli.main` and the interpreter's own exit like any other.

    {"run": [arguments], "output": path, "faults": [{"name": …}]} → pid      {"poll": pid} → exit code, or null
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


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
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, copy in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, copy)
    from snclr.cli import main
    from tests.faults import inject

    for fault in order["faults"]:
        getattr(inject, fault.pop("name"))(**fault)
    return main(order["run"])


if __name__ == "__main__":
    import lightning_fabric  # noqa: F401
    import timm  # noqa: F401
    import torchvision  # noqa: F401

    import snclr.commands.evaluation
    import snclr.commands.finetune
    import snclr.commands.pretrain
    import snclr.train.pretrain  # noqa: F401

    print(json.dumps(os.getpid()), flush=True)
    todo = serve()
    sys.exit(0 if todo is None else become(todo))
