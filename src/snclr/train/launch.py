"""Starting: the device, the precision and, where several processes train together, those."""

from __future__ import annotations

import os
from typing import Any

import torch

from snclr.config import PretrainConfig
from snclr.errors import UserError

PRECISIONS: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def launch(config: PretrainConfig) -> Any:
    """Start Fabric: device, precision and, where asked for, further processes."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    accelerator = config.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("accelerator cuda was asked for, but torch sees no CUDA device; give --accelerator cpu or auto")
    if accelerator == "cpu" and config.precision != "32":
        raise UserError(
            f"precision {config.precision} is for GPUs: few processors compute in it, and some die of it."
            " Give --precision 32."
        )
    devices: int | str = "auto" if config.devices == "auto" else int(config.devices)
    if accelerator == "cpu" and devices == "auto":
        devices = 1
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    several = (
        launched
        or config.nodes > 1
        or devices not in (1, "auto")
        or (devices == "auto" and torch.cuda.device_count() > 1)
    )
    if several and accelerator == "cpu":
        raise UserError("training on the CPU uses one process (it uses all cores); give --devices 1")
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=config.nodes,
        precision=PRECISIONS[config.precision],
        # The queue is the same on every process by construction: sending it with each step would be waste.
        strategy=DDPStrategy(broadcast_buffers=False) if several else "auto",
    )
    fabric.launch()
    if config.batch_size % fabric.world_size:
        near = round(config.batch_size / fabric.world_size) * fabric.world_size
        raise UserError(
            f"batch_size {config.batch_size} cannot be shared equally by {fabric.world_size} processes; the nearest"
            f" that can is {max(near, fabric.world_size)}"
        )
    return fabric
