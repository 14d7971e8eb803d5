"""The checks of `snclr doctor` on the pretended GPU; prints what they found as one JSON object.

python -m tests.device.doctor
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snclr.diagnostics.kernels import check_kernels
from snclr.diagnostics.methods import CASES, difference, reference, step_with_overflow, train_steps
from snclr.diagnostics.recipe import random_batch, step_parts
from snclr.diagnostics.setup import Setup, tiny_batches, tiny_config
from snclr.train.build import build_task
from tests.device.steps import PretendedFabric, start
from tests.helpers.pretended_gpu import NAME, PretendedGpu


def main() -> None:
    start(1)
    setup = Setup(f"{NAME}:0", 1, "demo", True, Path(tempfile.gettempdir()))
    found: dict[str, Any] = {}
    expected = {name: reference(name) for name in ("snclr", "snclr, ViT", "swav")}  # on the CPU
    batches = tiny_batches("snclr", 32)
    with PretendedGpu():
        found["kernels"] = [asdict(row) for row in check_kernels(setup)]
        found["methods"] = {
            name: difference(train_steps(build_task(tiny_config(**CASES[name]), PretendedFabric(1))), expected[name])
            for name in expected
        }
        with tempfile.TemporaryDirectory() as folder:
            task = build_task(tiny_config(out=folder), PretendedFabric(1))
            found["overflow"] = step_with_overflow(task, task.fabric.to_device(batches[0]))
            parts = step_parts(task)
            for part in parts.values():
                part()
            task.training_step(random_batch(task, 12))  # another batch than the loader's
        found["parts"] = list(parts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
