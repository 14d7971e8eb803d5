"""Start the ranks of a job with Lightning Fabric, on their device and with the given precision."""

import atexit
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export them to mypy

from snclr.distributed.collectives import create_cpu_groups, destroy_process_groups, rank_and_size
from snclr.distributed.environment import ResolvedEnvironment, resolve_environment, warn_of_unused_tasks
from snclr.errors import UserError, first_line
from snclr.runtime.device import pick_device
from snclr.runtime.machine import check_precision
from snclr.runtime.stop import STARTED_BY, stop_with_parent

PRECISIONS: dict[str, Any] = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
TIMEOUT_SECONDS = 600.0
"""Default timeout of collectives."""


def launch(
    *,
    device: str = "auto",
    devices: str = "1",
    nodes: int = 1,
    precision: str = "32",
    timeout: float = TIMEOUT_SECONDS,
    batch_size: int | None = None,
) -> Any:
    """Start Fabric and return it: on one rank, on `devices` ranks per node, or on the ranks of a launcher.

    `device` is a device type, auto, or a single GPU (cuda:1). `devices` is a number of ranks on this node, or auto
    (all GPUs). A collective fails after `timeout` seconds. `batch_size` is checked to be divisible by the world size.
    """
    from lightning_fabric import Fabric

    from snclr.distributed.gradients import RankStrategy

    device, precision = pick_device(device), precision.removesuffix("-mixed")
    accelerator, _, index = device.partition(":")
    check_precision(device, precision)
    env = resolve_environment(accelerator, devices, nodes)
    if index and env.world_size > 1:
        raise UserError(f"--device {device} selects one GPU, but there are {env.world_size} ranks. Give --device cuda.")
    warn_of_unused_tasks(env)
    backend = "gloo" if accelerator == "cpu" else "nccl"
    limit = timedelta(seconds=timeout)
    fabric = Fabric(
        accelerator=accelerator,
        devices=[int(index)] if index else env.local_world_size,
        num_nodes=env.num_nodes,
        precision=PRECISIONS[precision],
        strategy=RankStrategy(process_group_backend=backend, timeout=limit) if env.world_size > 1 else "auto",
        plugins=[env.for_fabric()],
    )
    # Only Fabric's launcher has something to report: that a rank it started has died.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    if env.world_size > 1:
        if env.launcher == "torchrun" or os.environ.get(STARTED_BY) == str(os.getppid()):
            stop_with_parent()
        if env.launcher is None:
            os.environ[STARTED_BY] = str(os.getpid())
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that ends has the others print C++ frames
        init_after_restart(backend, limit)
        atexit.unregister(destroy_process_groups)  # register once, even if a program launches several jobs
        atexit.register(destroy_process_groups)
    _connect(fabric, env, timeout)
    create_cpu_groups(limit)
    if batch_size is not None:
        check_batch_size(batch_size, fabric.world_size)
    return fabric


def check_batch_size(batch_size: int, world_size: int) -> None:
    """Reject a global batch size that is not divisible by the world size.

    >>> check_batch_size(256, 3)
    Traceback (most recent call last):
        ...
    snclr.errors.UserError: batch_size=256 is not divisible by 3 ranks; the nearest that is: 255
    """
    if batch_size % world_size:
        nearest = max(round(batch_size / world_size), 1) * world_size
        raise UserError(
            f"batch_size={batch_size} is not divisible by {world_size} ranks; the nearest that is: {nearest}"
        )


def init_after_restart(backend: str, timeout: timedelta) -> None:
    """Initialize the process group of ranks that torchrun has restarted on one node; otherwise do nothing.

    torchrun keeps one store for all attempts, so a restarted rank may read the address of a dead one (pytorch issue
    135712). Without a prefix per attempt none of three restarts succeeded under torch 2.15; one showed "connection
    refused". Nodes count attempts separately, so several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    env = os.environ
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    if env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"]:
        return
    shared = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout=timeout)
    store = PrefixStore(f"snclr/attempt-{attempt}", shared)
    dist.init_process_group(
        backend, store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]), timeout=timeout
    )


def _connect(fabric: Any, env: ResolvedEnvironment, timeout: float) -> None:
    """Start the other ranks, if Fabric is to, and initialize the process group."""
    address = f"{env.address}:{env.port}"
    if env.launcher is None and env.num_nodes > 1 and env.local_rank == 0:
        print(f"connecting {env.num_nodes} nodes at {address}, timeout {timeout:g} s", file=sys.stderr)
    try:
        fabric.launch()
    except RuntimeError as error:
        if env.world_size == 1:
            raise
        raise UserError(
            f"rank {env.rank} could not connect to all {env.world_size} ranks at {address}"
            f" ({first_line(error)}). Start every rank within {timeout:g} seconds, on a node that can reach"
            " that address and port."
        ) from error
    if (actual := rank_and_size()) != (env.rank, env.world_size):
        raise UserError(
            f"requested rank {env.rank} of {env.world_size}, but this is rank {actual[0]} of {actual[1]}. A program"
            " has one world size: give the same --devices and --nodes each time."
        )
