"""Write the host waits of methods and evaluations to host_waits.json: `python -m tests.device.record`."""

import json
import tempfile
from pathlib import Path

from tests.device.subprocess_runs import BUDGET, run_evaluations, run_module


def waits(found: dict) -> dict:
    return {name: counts["waits"] for name, counts in found.items()}


def main() -> None:
    recorded = {size: waits(run_module("steps", size)) for size in ("1", "8")}
    with tempfile.TemporaryDirectory() as folder:
        evaluations = {size: waits(found) for size, found in run_evaluations(Path(folder)).items()}
    BUDGET.write_text(json.dumps({**recorded, "evaluations": evaluations}, indent=2) + "\n")


if __name__ == "__main__":
    main()
