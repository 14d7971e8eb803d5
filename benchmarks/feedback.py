"""Seconds to the first line, to the first progress, and the longest silence of each command on a terminal.

    python benchmarks/feedback.py [--json] [COMMAND ...]

Every command runs on the demo images in a pseudo-terminal of 80 columns, and the time of each piece of output is
recorded. "Progress" is the first output after the opening line; "silence" is the longest time without output until the
result. Run it twice after an installation: the operating system caches the imported files.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "pretrain": "pretrain --recipe demo --data demo --epochs 1 --out {folder}/again",
    "plan": "plan --recipe demo --data demo",
    "knn": "knn {run} --no-cache",
    "linear": "linear {run} --epochs 5 --no-cache",
    "embed": "embed {run} --data demo --out {folder}/features.npz",
    "neighbors": "neighbors {run} --out {folder}/neighbors.png",
    "report": "report {run}",
    "export": "export {run} --to safetensors",
    "export-onnx": "export {run} --to onnx",
}


def record(arguments: list[str]) -> tuple[int, list[float], list[str]]:
    """Run one command on a terminal; return its exit code, and the times and texts of its output since the start."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "snclr", *arguments], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    times, shown = [], []
    try:
        while chunk := os.read(ours, 65536):
            times.append(time.perf_counter() - start)
            shown.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", chunk.decode(errors="replace")))
    except OSError:  # Linux raises it when the other end is closed
        pass
    os.close(ours)
    code = child.wait()
    return code, times, shown


def main() -> None:
    """Measure the given commands and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(f"{'seconds to':<14}{'first line':>12}{'progress':>12}{'result':>12}{'silence':>12}")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        code, _, shown = record(f"pretrain --recipe demo --data demo --epochs 1 --out {run}".split())
        assert code == 0, "".join(shown)
        for name in options.commands or COMMANDS:
            code, times, shown = record(COMMANDS[name].format(folder=folder, run=run).split())
            assert code == 0, "".join(shown)
            lines = [moment for moment in times if moment - times[0] > 0.05]  # one line may arrive in pieces
            gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
            before = "".join(["the start", *shown][: gaps.index(max(gaps)) + 1])
            after = next(line.strip() for line in reversed(re.split(r"[\r\n]", before)) if line.strip())
            row = {"first_line": times[0], "progress": lines[0] if lines else times[-1], "result": times[-1]}
            row["silence"] = max(gaps)
            if options.json:
                figures = {key: round(value, 2) for key, value in row.items()}
                print(json.dumps({"command": name, **figures, "silence_after": after}))
            else:
                print(f"{name:<14}" + "".join(f"{value:>12.2f}" for value in row.values()) + f"  after: {after[:60]}")


if __name__ == "__main__":
    main()
