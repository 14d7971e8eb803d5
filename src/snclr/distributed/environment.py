"""Which ranks a job has: from torchrun or srun, else from `--devices` and `--nodes`.

Fabric's own detection takes every SLURM allocation for a launch by srun, and needs equally many ranks per node.
"""

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from snclr.errors import UserError

_RANKS_FLAG = {"torchrun": "--nproc-per-node", "srun": "--ntasks-per-node"}


@dataclass(frozen=True)
class ResolvedEnvironment:
    """The ranks of a job and this process's place among them."""

    world_size: int
    local_world_size: int
    """Ranks on this node; other nodes may have fewer."""
    num_nodes: int = 1
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    launcher: str | None = None
    """torchrun, srun or manual; None if Fabric starts the other ranks of this node."""

    def for_fabric(self) -> Any:
        """Export the standard variables and return the Fabric environment that reads them."""
        from lightning_fabric.plugins.environments.lightning import LightningEnvironment
        from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

        if self.world_size > 1:
            variables = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port, "NODE_RANK": self.node_rank}
            if self.launcher is not None:
                variables |= {
                    "WORLD_SIZE": self.world_size, "RANK": self.rank, "LOCAL_RANK": self.local_rank,
                    "GROUP_RANK": self.node_rank,
                }  # fmt: skip
            os.environ.update({name: str(value) for name, value in variables.items()})
        return TorchElasticEnvironment() if self.world_size > 1 and self.launcher else LightningEnvironment()


def resolve_environment(accelerator: str, devices: str, nodes: int) -> ResolvedEnvironment:
    """Return the ranks that a launcher started, else those that the flags request."""
    env = _from_torchrun() or _from_srun()
    if env is None:
        env = _from_flags(ranks_per_node(accelerator, devices), nodes)
    # The default flags accept any launch; other values must match it.
    elif devices not in ("auto", "1", str(env.local_world_size)) or nodes not in (1, env.num_nodes):
        raise UserError(
            f"{env.launcher} started {env.local_world_size} of {env.world_size} ranks on this node (of"
            f" {env.num_nodes}), which contradicts --devices {devices} --nodes {nodes}. Set the number of ranks with"
            f" {env.launcher}'s {_RANKS_FLAG[str(env.launcher)]} and omit both flags (for a resumed run: --devices auto"
            " --nodes 1)."
        )
    if accelerator == "mps" and env.world_size > 1:
        raise UserError(f"an Apple GPU supports one rank, not {env.world_size}; give --devices 1")
    if accelerator == "cuda" and env.local_world_size > (gpus := torch.cuda.device_count()):
        raise UserError(
            f"{env.local_world_size} ranks on this node need one GPU each, but {gpus} are visible; use at most {gpus}"
            " ranks, or make all GPUs visible to every rank (SLURM: --gpus-per-node, not --gpus-per-task)"
        )
    return env


def ranks_per_node(accelerator: str, devices: str) -> int:
    """Return the number of ranks that `devices` requests; "auto" is one per GPU, or one."""
    if devices == "auto":
        return max(torch.cuda.device_count(), 1) if accelerator == "cuda" else 1
    return int(devices)


def warn_of_unused_tasks(env: ResolvedEnvironment) -> None:
    """Print a warning if SLURM allocated more tasks than were launched, most likely because srun is missing."""
    allocated = os.environ.get("SLURM_NTASKS", "1")
    if not env.launcher and not env.local_rank and allocated.isdecimal() and int(allocated) > env.world_size:
        print(
            f"warning: SLURM allocated {allocated} tasks, but only {env.world_size} will run: this command was not"
            " started by srun. Put srun before the command to use all tasks.",
            file=sys.stderr,
        )


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's compressed list of tasks per node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, repeats in groups for _ in range(int(repeats or 1))]


def _from_torchrun() -> ResolvedEnvironment | None:
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    world_size, local_world_size = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    return ResolvedEnvironment(
        world_size, local_world_size, int(env.get("GROUP_WORLD_SIZE", world_size // local_world_size)),
        int(env["RANK"]), int(env["LOCAL_RANK"]), int(env.get("GROUP_RANK", "0")), env["MASTER_ADDR"],
        int(env["MASTER_PORT"]), "torchrun",
    )  # fmt: skip


def _from_srun() -> ResolvedEnvironment | None:
    """Return the tasks of an srun step, if there are several.

    Only srun sets the variables of a step. A batch script has SLURM_NTASKS too but runs once.
    """
    env = os.environ
    world_size = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if world_size == 1 or "SLURM_PROCID" not in env:
        return None
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

    num_nodes, node_rank = int(env.get("SLURM_STEP_NUM_NODES", "1")), int(env.get("SLURM_NODEID", "0"))
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    # Steps of one job may run at the same time: each needs its own port.
    port = 15000 + (int(env.get("SLURM_JOB_ID", "0")) + 1009 * int(env.get("SLURM_STEP_ID", "0"))) % 10000
    return ResolvedEnvironment(
        world_size, tasks[node_rank] if node_rank < len(tasks) else -(-world_size // num_nodes), num_nodes,
        int(env["SLURM_PROCID"]), int(env.get("SLURM_LOCALID", "0")), node_rank,
        env.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(hosts),
        int(env.get("MASTER_PORT") or port), "srun",
    )  # fmt: skip


def _from_flags(devices: int, nodes: int) -> ResolvedEnvironment:
    env = os.environ
    if devices * nodes == 1:
        return ResolvedEnvironment(1, 1)
    if hasattr(sys, "ps1"):
        raise UserError(
            f"{devices} ranks cannot be started from a notebook or an interactive Python; use --devices 1, or run the"
            " program as a file"
        )
    started = "LOCAL_RANK" in env and "MASTER_PORT" in env  # by Fabric in rank 0, or by hand
    if nodes == 1 and not started:  # a leftover MASTER_ADDR must not matter on a single node
        from lightning_fabric.plugins.environments.lightning import find_free_network_port

        return ResolvedEnvironment(devices, devices, port=find_free_network_port())
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not env.get(name)]
    if nodes > 1 and missing:
        raise UserError(
            f"--nodes {nodes} needs the address of the first node; not set: {', '.join(missing)}. Put torchrun (in a"
            " SLURM job srun) before the command instead of --devices and --nodes, or set the variables, with NODE_RANK"
            " from 0 on the first node:\n"
            f"  MASTER_ADDR=FIRST-NODE MASTER_PORT=29500 NODE_RANK=0 snclr ... --devices {devices} --nodes {nodes}"
        )
    node_rank, local_rank = _int_variable("NODE_RANK", 0, nodes - 1), _int_variable("LOCAL_RANK", 0, devices - 1)
    return ResolvedEnvironment(
        devices * nodes, devices, nodes, node_rank * devices + local_rank, local_rank, node_rank,
        env.get("MASTER_ADDR", "127.0.0.1"), _int_variable("MASTER_PORT", 1, 65535), "manual" if started else None,
    )  # fmt: skip


def _int_variable(name: str, low: int, high: int) -> int:
    value = os.environ.get(name, "0")
    if not (value.isdecimal() and low <= int(value) <= high):
        raise UserError(f"the variable {name} is {value!r}; it must be a number from {low} to {high}")
    return int(value)
