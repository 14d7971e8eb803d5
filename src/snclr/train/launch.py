"""Starting: the device, the precision and, where several processes work together, those.

Processes come from `--devices` and `--nodes` (Fabric starts the others), from torchrun, or from SLURM's srun; the last
two say themselves how many there are.
"""

from __future__ import annotations

import atexit
import datetime
import inspect
import logging
import os
from typing import Any

import torch

from snclr.config import PretrainConfig
from snclr.distributed import leave, rejoin_after_restart
from snclr.errors import UserError

PRECISIONS: dict[str, Any] = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
TIMEOUT_SECONDS = 600.0


def launch(config: PretrainConfig) -> Any:
    """Start Fabric for a run, and check that its processes can share a batch."""
    fabric = start(
        accelerator=config.accelerator,
        devices=config.devices,
        nodes=config.nodes,
        precision=config.precision,
        timeout=config.timeout,
    )
    check_batch(config.batch_size, fabric.world_size)
    return fabric


def check_batch(batch_size: int, processes: int) -> None:
    """Refuse a global batch that the processes cannot share equally, and say which could be.

    >>> check_batch(256, 3)
    Traceback (most recent call last):
        ...
    snclr.errors.UserError: batch_size 256 cannot be shared equally by 3 processes; the nearest that can is 255
    """
    if batch_size % processes:
        near = max(round(batch_size / processes), 1) * processes
        raise UserError(
            f"batch_size {batch_size} cannot be shared equally by {processes} processes; the nearest that can is {near}"
        )


def start(
    *,
    accelerator: str = "auto",
    devices: str = "1",
    nodes: int = 1,
    precision: str = "32",
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Start Fabric: device, precision and, where asked for, further processes.

    `devices` is a number of processes on this machine, or auto (all GPUs). No process waits longer than `timeout`
    seconds for another.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    accelerator = _pick_accelerator(accelerator)
    if accelerator == "cpu" and precision in ("16", "bf16"):
        raise UserError(
            f"precision {precision} is for GPUs: few processors compute in it, and some die of it. Give --precision 32."
        )
    local, nodes = _processes(accelerator, devices, nodes)
    strategy = DDPStrategy(
        **_without_buffer_sync(),
        process_group_backend="gloo" if accelerator == "cpu" else None,
        timeout=datetime.timedelta(seconds=timeout),
    )
    fabric = Fabric(
        accelerator=accelerator,
        devices=local,
        num_nodes=nodes,
        precision=PRECISIONS[precision],
        strategy=strategy if local * nodes > 1 else "auto",
    )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # who was started is our own lines' business
    if local * nodes > 1:
        rejoin_after_restart("gloo" if accelerator == "cpu" else "nccl", datetime.timedelta(seconds=timeout))
        atexit.unregister(leave)  # once is enough, however many jobs a program starts
        atexit.register(leave)
    fabric.launch()
    return fabric


def _without_buffer_sync() -> dict[str, Any]:
    """The queue is the same on every process by construction: sending it with each step would be waste."""
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _pick_accelerator(accelerator: str) -> str:
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("accelerator cuda was asked for, but torch sees no CUDA device; give --accelerator cpu or auto")
    return accelerator


def _processes(accelerator: str, devices: str, nodes: int) -> tuple[int, int]:
    """Processes on this machine, and machines: as a launcher says, else as the flags say."""
    asked = None if devices == "auto" else int(devices)
    launched = _launched()
    if launched is not None:
        local, machines, launcher = launched
        # The defaults mean "as started"; a different number that was given is a mistake to point out.
        if asked not in (None, 1, local) or nodes not in (1, machines):
            raise UserError(
                f"{launcher} started {local} processes on each of {machines} machines, but --devices {devices} --nodes"
                f" {nodes} asks for others; leave both flags out"
            )
        return local, machines
    if asked is None:
        asked = max(torch.cuda.device_count(), 1) if accelerator == "cuda" else 1
    if accelerator == "mps" and asked * nodes > 1:
        raise UserError("an Apple GPU trains with one process; give --devices 1")
    return asked, nodes


def _launched() -> tuple[int, int, str] | None:
    """(processes on this machine, machines, who started them), where a launcher did."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        world, local = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
        return (local, world // local, "torchrun") if world > 1 else None
    # srun sets this for its step; in a batch script that runs without srun there is one process, whatever was allotted.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        tasks, machines = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "1"))
        return tasks // machines, machines, "srun"
    return None
