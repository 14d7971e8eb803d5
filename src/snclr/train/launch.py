"""Starting: the device, the precision and, where several processes work together, those.

Processes come from `--devices` and `--nodes` (Fabric starts the others of this machine), from torchrun, or from SLURM's
srun; the last two say themselves how many there are.
"""

from __future__ import annotations

import atexit
import datetime
import inspect
import logging
import os
import sys
from typing import Any

from snclr.config import PretrainConfig
from snclr.devices import pick_device
from snclr.distributed import leave, rank_and_size, rejoin_after_restart
from snclr.errors import UserError
from snclr.train.fabric import DDPStrategy, Fabric
from snclr.train.processes import Known, Processes, find_processes, unused_tasks
from snclr.train.signals import STARTED_BY
from snclr.train.watch import TIMEOUT_SECONDS

PRECISIONS: dict[str, Any] = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
_FABRICS_LAUNCHER = "lightning_fabric.strategies.launchers.subprocess_script"


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
    accelerator = pick_device(accelerator)
    if accelerator == "cpu" and precision in ("16", "bf16"):
        raise UserError(
            f"precision {precision} is for GPUs: few processors compute in it, and some die of it. Give --precision 32."
        )
    processes = find_processes(accelerator, devices, nodes)
    if (word := unused_tasks(processes)) is not None:
        print(f"warning: {word}", file=sys.stderr)
    several = processes.total > 1
    strategy = DDPStrategy(
        **_without_buffer_sync(),
        process_group_backend="gloo" if accelerator == "cpu" else None,
        timeout=datetime.timedelta(seconds=timeout),
    )
    fabric = Fabric(
        accelerator=accelerator,
        devices=processes.here,
        num_nodes=processes.machines,
        precision=PRECISIONS[precision],
        strategy=strategy if several else "auto",
        plugins=[Known(processes)],
    )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # who was started is our own lines' business
    logging.getLogger(_FABRICS_LAUNCHER).setLevel(logging.INFO)  # but that one has died is said by it alone
    if several:
        rejoin_after_restart("gloo" if accelerator == "cpu" else "nccl", datetime.timedelta(seconds=timeout))
        if processes.launcher is None:
            os.environ[STARTED_BY] = str(os.getpid())
        atexit.unregister(leave)  # once is enough, however many jobs a program starts
        atexit.register(leave)
    _meet(fabric, processes, timeout)
    return fabric


def _meet(fabric: Any, processes: Processes, timeout: float) -> None:
    """Wait for the other processes; those that cannot be found are nobody's bug."""
    place = f"{processes.address}:{processes.port}"
    if processes.launcher is None and processes.machines > 1 and processes.local_rank == 0:
        print(f"meeting {processes.machines} machines at {place}, within {timeout:g} seconds", file=sys.stderr)
    try:
        fabric.launch()
    except RuntimeError as error:
        if processes.total == 1:
            raise
        raise UserError(
            f"{processes.total} processes were to meet at {place}, but process {processes.rank} did not find them all"
            f" ({str(error).splitlines()[0]}). All must be started, within {timeout:g} seconds, and reach that"
            " address and port"
        ) from error
    if (found := rank_and_size()) != (processes.rank, processes.total):
        raise UserError(
            f"process {processes.rank} of {processes.total} was asked for, but this is {found[0]} of {found[1]}: one"
            " program can work with one number of processes; give the same --devices and --nodes each time"
        )


def _without_buffer_sync() -> dict[str, Any]:
    """The queue is the same on every process by construction: sending it with each step would be waste."""
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
