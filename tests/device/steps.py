"""Three training steps of every method on the pretended GPU; prints what was counted in the last as one JSON object.

python -m tests.device.steps WORLD_SIZE
"""

from __future__ import annotations

import collections
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch.testing._internal.distributed.fake_pg import FakeStore

from snclr.methods.config import METHODS
from snclr.runtime.stop import StopFlag
from snclr.train.build import build_task
from snclr.train.config import resolve, settings_for_method
from snclr.train.pretrain_task import PretrainTask
from snclr.train.trainer import Trainer
from tests.helpers.pretended_gpu import NAME, PretendedGpu

SMALL = {
    "data": "demo", "out": "unused", "recipe": "demo", "encoder": "resnet10-tiny", "image_size": 16, "batch_size": 32,
    "hidden": 32, "dim": 16, "workers": 0, "device": "cpu", "compile": False,
}  # fmt: skip
# On a CPU, the gradient of a strided bfloat16 convolution of 1×1 pixels has random values (torch 2.15); at 16 pixels,
# a patch has one pixel in the last stage.
LARGER = {name: {"image_size": 32} for name in ("pirl", "detco")}
PARTS = ("batch", "step", "metrics")
STEPS = 3


class PretendedFabric:
    """What a task uses of Fabric, for one rank on the pretended device; gradients are not reduced."""

    device = torch.device(f"{NAME}:0")
    global_rank = 0
    is_global_zero = True

    def __init__(self, world_size: int, autocast: bool = False) -> None:
        self.world_size = world_size
        self.strategy = self
        self.precision = self
        self._autocast = autocast

    def setup(self, module: Any, optimizer: Any) -> tuple[Any, Any]:
        return module, optimizer

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(NAME, dtype=torch.bfloat16) if self._autocast else nullcontext()

    def convert_input(self, views: Any) -> Any:
        return views

    def to_device(self, batch: Any) -> Any:
        return move_data_to_device(batch, self.device)

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, module: Any, optimizer: Any, max_norm: float, **options: Any) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, **options)


def run_method(name: str, world_size: int) -> dict[str, Any]:
    """Return the counts of the last of three steps: host waits by part and line, kernels, collectives, dtypes."""
    vit = {"encoder": "vit_tiny"} if METHODS[name].masks_patches else {}
    config = resolve(settings_for_method(name, {**SMALL, **LARGER.get(name, {}), "method": name, **vit}))
    counts: dict[str, collections.Counter[str]] = {}
    with PretendedGpu() as gpu, StopFlag() as stop:
        task: PretrainTask = build_task(config, PretendedFabric(world_size, autocast=True))
        task.progress = SilentProgress()  # type: ignore[assignment]
        trainer = Trainer(task=task, description=name, checkpoints=None, stop=stop, save_every=10)
        batches = task.batches(0)
        for step in range(STEPS):
            gpu.reset()
            batch = trainer._next_batch(batches, step, first=step == 0)
            counts["batch"] = lines(gpu)
            gpu.reset()
            output, lr, norm = task.training_step(batch)
            counts["step"] = lines(gpu)
            kernels, collectives = gpu.kernels, dict(gpu.collectives)
            dtypes = {op: sorted(str(d) for d in found) for op, found in gpu.dtypes.items()}
            gpu.reset()
            values = task._measure(batch, output, lr, norm)
            counts["metrics"] = lines(gpu)
        parameters = sorted({str(p.device.type) for p in task.module.parameters()} | {str(output.loss.device.type)})
    assert values["loss"] == values["loss"]
    return {
        "waits": {part: sum(counts[part].values()) for part in PARTS}, "lines": counts, "kernels": kernels,
        "collectives": collectives, "dtypes": dtypes, "loss_dtype": str(output.loss.dtype), "devices": parameters,
    }  # fmt: skip


def lines(gpu: PretendedGpu) -> collections.Counter[str]:
    return collections.Counter({f"{what} at {line}": count for (what, line), count in sorted(gpu.waits.items())})


class SilentProgress:
    """A progress bar that shows nothing."""

    done = 0

    def print(self, text: str) -> None:
        pass

    def update(self, *_: object) -> None:
        pass


def start(world_size: int) -> None:
    """Prepare the process: one thread, and a fake process group if there are several ranks."""
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # the backward pass has to see the dispatch mode
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def main(world_size: int) -> None:
    start(world_size)
    print(json.dumps({name: run_method(name, world_size) for name in METHODS}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
