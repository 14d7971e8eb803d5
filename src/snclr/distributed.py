"""The only place that talks to torch.distributed: what training and evaluation need of the other processes.

Every function is the obvious one in a single process. All but `is_distributed`, `rank_and_size` and `share_of` are
collective: each process must call them, in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them too, without saying so

from snclr.errors import OtherProcessError, UserError

ValueT = TypeVar("ValueT")
_MEETINGS = itertools.count()


def is_distributed() -> bool:
    """Whether several processes work together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes: (0, 1) when alone."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def share_of(count: int) -> range:
    """This process's contiguous part of range(count): the parts differ by one at most, and nothing is padded.

    >>> share_of(5)
    range(0, 5)
    """
    rank, size = rank_and_size()
    return range(count * rank // size, count * (rank + 1) // size)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """Concatenate a tensor (N, ...) of equal shape over all processes, in rank order: (N × processes, ...).

    It carries no gradient: targets, candidates and ids need none.
    """
    if not is_distributed():
        return tensor
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


@torch.no_grad()
def gather_rows(tensor: Tensor) -> Tensor:
    """Concatenate tensors (n, ...) over all processes, in rank order, where their numbers of rows n differ."""
    if not is_distributed():
        return tensor
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = torch.split(gather(padded), max(counts)) if max(counts) else [tensor]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])


def gather_objects(value: ValueT) -> list[ValueT]:
    """One small value of each process, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, on each of them; the tensor given is overwritten by it."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def broadcast_object(value: ValueT) -> ValueT:
    """Process 0's value, on every process."""
    if not is_distributed():
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]


@torch.no_grad()
def broadcast_tensors(tensors: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
    """Process 0's tensors by name, on the CPU of every process; sent through `device`, one after the other."""
    if not is_distributed():
        return dict(tensors or {})
    shapes = broadcast_object({name: (value.shape, value.dtype) for name, value in (tensors or {}).items()})
    received: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        value = torch.empty(shape, dtype=dtype) if tensors is None else tensors[name]
        sent = value.to(device).contiguous()
        dist.broadcast(sent, src=0)
        received[name] = sent.cpu()
    return received


def leads_machine() -> bool:
    """Whether this process has the lowest rank of its machine: what it downloads or indexes, the others there find."""
    return gather_objects(_home()).index(_home()) == rank_and_size()[0]


def same_on_all(digest: Callable[[], str], what: str) -> None:
    """Refuse, on every process, what one sees otherwise than the first; `what` is as in "images in photos/"."""
    if not is_distributed():
        return
    with together():
        own = digest()
    for rank, other in enumerate(digests := gather_objects(own)):
        if other != digests[0]:
            raise UserError(
                f"process {rank} sees other {what} than process 0; give every machine the same, in the same place"
            )


def barrier() -> None:
    """Wait until every process has come this far."""
    if is_distributed():
        dist.barrier()


def meet() -> None:
    """Wait until every process has come this far, however long one of them needs to read, download or index.

    A collective gives up after the job's timeout, and cannot tell slow work from a hang. Here each puts down that it is
    there, and looks for the others; one that hangs, or has died on another machine, is for the launcher, or
    `snclr.train.watch`, to find. Where one of this machine has died, or the place to look is gone with the launcher
    that kept it, nothing is waited for: the collective that follows fails at once.
    """
    if not is_distributed():
        return
    store, rank, number = dist.distributed_c10d._get_default_store(), dist.get_rank(), next(_MEETINGS)
    older, before, now = (
        [f"snclr/meeting-{n}/{other}" for other in range(dist.get_world_size())] for n in range(number - 2, number + 1)
    )
    pause = 0.001
    with contextlib.suppress(RuntimeError):  # torch's errors of a store are of that kind
        store.set(now[rank], f"{os.getpid()} {_home()}")
        while not store.check(now):
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
            if pause == 0.2 and any(_has_died(store, key) for key in before):
                return
        store.delete_key(older[rank])  # whoever is here has left the meeting before, and looks at none older


def _has_died(store: Any, key: str) -> bool:
    """Whether the process that wrote the key was of this machine, and container, and is gone."""
    if os.name != "posix" or not store.check([key]):
        return False
    pid, home = store.get(key).decode().split(" ", 1)
    if home != _home():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


@functools.cache
def _home() -> str:
    """What the numbers of processes belong to: containers number their own, and machines may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def rejoin_after_restart(backend: str, timeout: timedelta) -> None:
    """Meet the other processes anew where torchrun has restarted them on one machine; else do nothing.

    torchrun keeps one store for all attempts, and in it the addresses of the attempt before: a process that reads one
    of them calls a process that is gone (pytorch issue 135712). A prefix for each attempt hides them. On several
    machines the attempts are not counted alike, so there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 must do it.
    """
    env = os.environ
    restarted = (
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    )
    if not restarted or env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"] or dist.is_initialized():
        return
    shared = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout=timeout)
    store = PrefixStore(f"snclr/attempt-{env['TORCHELASTIC_RESTART_COUNT']}", shared)
    dist.init_process_group(
        backend, store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]), timeout=timeout
    )


def leave() -> None:
    """Take leave of the other processes, for the end of a program: torch's threads must not outlive Python's."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def open_store(answer_seconds: float) -> Any:
    """A key-value store kept by process 0, apart from torch's own: a thread may use it while the main waits."""
    host, waiting = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=answer_seconds)
    keeper = dist.get_rank() == 0
    store = TCPStore(host, 0, None, True, timeout=waiting, wait_for_workers=False) if keeper else None
    port = broadcast_object(0 if store is None else store.port)
    return store or TCPStore(host, port, None, False, timeout=waiting, wait_for_workers=False)


def fail_together(error: BaseException | None) -> None:
    """Raise on every process when any of them brings an error: those without would wait for the failed one for ever.

    The process that failed raises its own error; the others an OtherProcessError with its rank and reason. They wait
    for each other as long as it takes.
    """
    if not is_distributed():
        if error is not None:
            raise error
        return
    meet()
    reasons = gather_objects(None if error is None else f"{error}" if isinstance(error, UserError) else repr(error))
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise OtherProcessError(f"process {rank} failed, and all stop with it: {reason}")


@contextmanager
def together() -> Iterator[None]:
    """Raise an error inside the block, of any process, on every one: none goes on to wait for a process that left."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    fail_together(error)
