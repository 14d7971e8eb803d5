"""Run the modules of this folder in processes of their own, since the pretended device is registered for a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("host_waits.json")
ADVICE = f"if the change is intended, write it to {BUDGET.relative_to(ROOT)}: python -m tests.device.record"


def run_module(name: str, *arguments: str) -> dict[str, Any]:
    """Run a module; return the JSON object in its last line, {} without one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", f"tests.device.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    return found


def run_evaluations(folder: Path) -> dict[str, Any]:
    """Prepare a tiny run, and evaluate it on one rank and as one of eight."""
    run_module("evaluations", "prepare", str(folder))
    return {size: run_module("evaluations", size, str(folder)) for size in ("1", "8")}
