"""Write the host waits of every method to host_waits.json: `python -m tests.device.record`."""

import json

from tests.device.test_steps import BUDGET, run_module


def main() -> None:
    counted = {size: run_module("steps", size) for size in ("1", "8")}
    waits = {size: {name: counts["waits"] for name, counts in found.items()} for size, found in counted.items()}
    BUDGET.write_text(json.dumps(waits, indent=2) + "\n")


if __name__ == "__main__":
    main()
