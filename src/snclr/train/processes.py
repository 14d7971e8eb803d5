"""How many processes work together, which of them this one is, and where they meet.

A launcher (torchrun, srun) says so in variables; otherwise `--devices` and `--nodes` do, and Fabric starts the others
of this machine. Left alone, Fabric would guess from the same variables, and wrongly where SLURM has allotted tasks that
nobody started: so it is told.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass

import torch

from snclr.errors import UserError
from snclr.train.fabric import ClusterEnvironment, SLURMEnvironment

_MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_MORE = {"torchrun": "--nproc-per-node", "srun": "--ntasks-per-node"}


@dataclass(frozen=True)
class Processes:
    """All processes of a job, as one of them sees them."""

    total: int
    here: int
    """Those on this machine; a launcher may have started fewer on another."""
    machines: int = 1
    rank: int = 0
    local_rank: int = 0
    machine: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    launcher: str | None = None
    """Who started them; None where Fabric is to start the others of this machine."""


def find_processes(accelerator: str, devices: str, nodes: int) -> Processes:
    """The processes a launcher started, else those the flags ask for."""
    asked = None if devices == "auto" else int(devices)
    found = _torchrun() or _srun()
    if found is None:
        if asked is None:
            asked = max(torch.cuda.device_count(), 1) if accelerator == "cuda" else 1
        found = _by_flags(asked, nodes)
    # The defaults mean "as started"; a different number that was given is a mistake to point out.
    elif asked not in (None, 1, found.here) or nodes not in (1, found.machines):
        launcher = str(found.launcher)
        raise UserError(
            f"{launcher} started {found.here} of {found.total} processes on this machine, one of {found.machines}, but"
            f" --devices {devices} --nodes {nodes} asks for others. Under {launcher} its own {_MORE[launcher]} says how"
            " many there are: leave both flags out (where a resumed run brings them along: --devices auto --nodes 1)"
        )
    if accelerator == "mps" and found.total > 1:
        raise UserError(f"an Apple GPU trains with one process, not {found.total}; give --devices 1")
    if accelerator == "cuda" and found.here > (gpus := torch.cuda.device_count()):
        raise UserError(
            f"{found.here} processes on this machine need a GPU each, but each sees {gpus}; ask for {gpus}, or let"
            " every process see all GPUs (SLURM: --gpus-per-node, not --gpus-per-task)"
        )
    return found


def _torchrun() -> Processes | None:
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    total, here = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    return Processes(
        total, here, int(env.get("GROUP_WORLD_SIZE", total // here)), int(env["RANK"]), int(env["LOCAL_RANK"]),
        int(env.get("GROUP_RANK", "0")), env["MASTER_ADDR"], int(env["MASTER_PORT"]), "torchrun",
    )  # fmt: skip


def _srun() -> Processes | None:
    """srun's tasks, where it started several; one task (an interactive shell, say) is a start like any other.

    Only srun counts the tasks of a step. SLURM_NTASKS is also there in a batch script, which runs once, whatever was
    allotted.
    """
    env = os.environ
    total = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if total == 1 or "SLURM_PROCID" not in env:
        return None
    machines, machine = int(env.get("SLURM_STEP_NUM_NODES", "1")), int(env.get("SLURM_NODEID", "0"))
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    # The steps of one job may run side by side: a port for each.
    port = 15000 + (int(env.get("SLURM_JOB_ID", "0")) + 1009 * int(env.get("SLURM_STEP_ID", "0"))) % 10000
    return Processes(
        total, tasks[machine] if machine < len(tasks) else -(-total // machines), machines, int(env["SLURM_PROCID"]),
        int(env.get("SLURM_LOCALID", "0")), machine,
        env.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes),
        int(env.get("MASTER_PORT") or port), "srun",
    )  # fmt: skip


def tasks_per_node(text: str) -> list[int]:
    """SLURM's short form of the tasks on each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _by_flags(here: int, nodes: int) -> Processes:
    env = os.environ
    if here * nodes == 1:
        return Processes(1, 1)
    if hasattr(sys, "ps1"):
        raise UserError(
            f"{here} processes were asked for in a notebook or an interactive Python, which cannot be started again for"
            " the others; give one, or run the program as a file"
        )
    started = "LOCAL_RANK" in env and "MASTER_PORT" in env  # by Fabric, in the first process; or by hand
    if nodes == 1 and not started:
        return Processes(here, here, port=_free_port())  # on one machine no variable has a say in where they meet
    if nodes > 1 and (missing := [name for name in _MEETING if not env.get(name)]):
        raise UserError(_how_to_meet(here, nodes, missing))
    machine, local_rank = _number("NODE_RANK", 0, nodes - 1), _number("LOCAL_RANK", 0, here - 1)
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 1, 65535)
    return Processes(
        here * nodes, here, nodes, machine * here + local_rank, local_rank, machine, address, port,
        "hand" if started else None,
    )  # fmt: skip


def _how_to_meet(here: int, nodes: int, missing: list[str]) -> str:
    slurm = "\nIn a SLURM job put srun before the command, with a task for each process." if _in_slurm() else ""
    return (
        f"--nodes {nodes} was given, but not where the machines meet: {', '.join(missing)} not set. Either start it by"
        " torchrun, with the same command on every machine and without --devices and --nodes:\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {here} --rdzv-backend c10d --rdzv-endpoint FIRST-MACHINE:29400"
        " --rdzv-id NAME -m snclr ...\n"
        "or set three variables and give the same command on every machine:\n"
        f"  MASTER_ADDR=FIRST-MACHINE MASTER_PORT=29500 NODE_RANK=0 snclr ... --devices {here} --nodes {nodes}\n"
        f"with NODE_RANK=0 on the first machine, up to {nodes - 1} on the last.{slurm}\n"
        "For this machine alone give --nodes 1."
    )


def _number(name: str, low: int, high: int) -> int:
    value = os.environ.get(name, "0")
    if not (value.isdecimal() and low <= int(value) <= high):
        raise UserError(f"the variable {name} is {value!r}; it must be a number from {low} to {high}")
    return int(value)


def _in_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


def unused_tasks(processes: Processes) -> str | None:
    """A word to one who was allotted more tasks by SLURM than will work, most likely because srun is missing."""
    allotted = os.environ.get("SLURM_NTASKS", "1")
    if processes.launcher or processes.local_rank or not allotted.isdecimal() or int(allotted) <= processes.total:
        return None
    return (
        f"SLURM allotted {allotted} tasks, but this command was not started by srun: {processes.total} will work. Put"
        " srun before the command to use all"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Known(ClusterEnvironment):
    """Tells Fabric what was found."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all are there already."""
        return self._processes.launcher is not None

    @property
    def main_address(self) -> str:
        """Where process 0 is."""
        return self._processes.address

    @property
    def main_port(self) -> int:
        """And at which port it listens."""
        return self._processes.port

    @staticmethod
    def detect() -> bool:
        """Never chosen by Fabric itself."""
        return False

    def world_size(self) -> int:
        """The number of all processes."""
        return self._processes.total

    def set_world_size(self, size: int) -> None:
        """Fabric's own sum, which an uneven launch would make wrong, changes nothing."""

    def global_rank(self) -> int:
        """Which of all."""
        return self._processes.rank

    def set_global_rank(self, rank: int) -> None:
        """As `set_world_size`."""

    def local_rank(self) -> int:
        """Which of this machine's."""
        return self._processes.local_rank

    def node_rank(self) -> int:
        """Which machine."""
        return self._processes.machine
