"""Collectives for training and evaluation. Only this package imports torch.distributed; lightly uses it too.

Every function also works on a single rank. Those that communicate, `is_first_rank_on_node` among them, are collective:
every rank must call them, in the same order.
"""

import functools
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from snclr.errors import OtherRankError, UserError, first_line
from snclr.runtime.stop import StopFlag

ValueT = TypeVar("ValueT")
LONG_TIMEOUT = timedelta(hours=24)
_RESPONSE_SECONDS = 5.0
_POLL_SECONDS = 0.02
_long_group: Any = None
_cpu_group: Any = None  # None: the default group is on the CPU


def is_distributed() -> bool:
    """Return whether the job has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size: (0, 1) for a single process."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def rank_share(count: int) -> range:
    """Return this rank's contiguous part of range(count); the parts differ by at most one and are not padded.

    >>> rank_share(5)
    range(0, 5)
    """
    rank, size = rank_and_size()
    return range(count * rank // size, count * (rank + 1) // size)


@torch.no_grad()
def all_gather(tensor: Tensor, group: Any = None) -> Tensor:
    """Concatenate tensors (N, ...) of equal shape in rank order: (N × world size, ...). No gradient."""
    if not is_distributed():
        return tensor
    gathered = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered


@torch.no_grad()
def all_gather_rows(tensor: Tensor) -> Tensor:
    """Concatenate tensors (n, ...) over all ranks, in rank order; n may differ between ranks. No gradient."""
    if not is_distributed():
        return tensor
    counts = all_gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = torch.split(all_gather(padded), max(counts)) if max(counts) else [tensor]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])


def all_gather_ints(values: list[int]) -> list[list[int]]:
    """Gather the same number of integers from each rank, in rank order, on the CPU: no GPU is synchronized."""
    return all_gather(torch.tensor([values]), _cpu_group).tolist()


def all_gather_objects(value: ValueT) -> list[ValueT]:
    """Gather one small picklable value per rank, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def broadcast_object(value: ValueT) -> ValueT:
    """Return rank 0's value on every rank."""
    if not is_distributed():
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]


@torch.no_grad()
def broadcast_tensors(tensors: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
    """Return rank 0's named tensors on the CPU of every rank, sent one by one through `device`."""
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


def is_first_rank_on_node() -> bool:
    """Return whether this is the lowest rank of its node, which downloads and indexes for the others. Collective."""
    return all_gather_objects(_node_id()).index(_node_id()) == rank_and_size()[0]


@functools.cache
def _node_id() -> str:
    """Identify the node: host names may repeat, and two containers of one host have separate files."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def check_equal_across_ranks(digest: Callable[[], str], what: str) -> None:
    """Raise on every rank if the digest of a rank differs from rank 0's; `what` completes "rank 1 has different …"."""
    if not is_distributed():
        return
    with raise_on_all_ranks():
        local_digest = digest()
    for rank, other in enumerate(digests := all_gather_objects(local_digest)):
        if other != digests[0]:
            raise UserError(f"rank {rank} has different {what} than rank 0; give every node the same data")


def barrier() -> None:
    """Wait until every rank has called this; fails after the job's timeout."""
    if is_distributed():
        dist.barrier()


def create_cpu_groups(timeout: timedelta) -> None:
    """Create the process groups of `long_barrier` and, for a job on GPUs, of `all_gather_ints`, once per job."""
    global _long_group, _cpu_group
    if is_distributed() and _long_group is None:
        _long_group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        if dist.get_backend() != "gloo":
            _cpu_group = dist.new_group(backend="gloo", timeout=timeout)


def long_barrier() -> None:
    """Wait until every rank has called this, for work such as downloads that may exceed the job's timeout.

    Fails at once if a rank dies. Polls, so that Python handles signals meanwhile.
    """
    if is_distributed():
        work = dist.barrier(_long_group, async_op=True)
        while not work.is_completed():
            time.sleep(_POLL_SECONDS)
        work.wait()


def destroy_process_groups() -> None:
    """Destroy all process groups; torch's threads must not outlive the interpreter."""
    global _long_group, _cpu_group
    _long_group = _cpu_group = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def raise_error_on_all_ranks(error: BaseException | None) -> None:
    """Raise on every rank if any rank passes an error, so that no rank waits for one that failed.

    A rank that failed raises its own error, the others an OtherRankError with its rank and message.
    """
    if is_distributed():
        local_message = None if error is None else str(error) if isinstance(error, UserError) else repr(error)
        messages = all_gather_objects(local_message)
        for rank, message in enumerate(messages):
            if error is None and message is not None:
                raise OtherRankError(f"rank {rank} failed: {message}")
    if error is not None:
        raise error


@contextmanager
def raise_on_all_ranks(*, long: bool = False) -> Iterator[None]:
    """Raise an error of any rank inside the block on every rank; a `long` block may exceed the job's timeout."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if long:
        long_barrier()
    raise_error_on_all_ranks(error)


@contextmanager
def name_missing_ranks() -> Iterator[None]:
    """Turn torch's error about a failed collective into a UserError that names the ranks that do not respond."""
    try:
        yield
    except RuntimeError as error:
        # torch raises plain RuntimeErrors, as bugs on this rank do: only those of a collective mean missing ranks.
        communication = isinstance(error, dist.DistError) or re.search(r"gloo|pair closure", str(error), re.IGNORECASE)
        if not is_distributed() or not communication:
            raise
        with StopFlag():  # the launcher's SIGTERM must not end this rank before it has reported the error
            missing = ", ".join(map(str, _unresponsive_ranks())) or "unknown"
        raise UserError(
            f"rank {dist.get_rank()} lost the connection to other ranks, or waited longer than the timeout. Ranks that"
            f" do not respond: {missing}. ({first_line(error)})"
        ) from error


def _unresponsive_ranks() -> list[int]:
    """Exchange one byte with every other rank and return those that do not answer within a few seconds.

    `dist.monitored_barrier` does not name a rank that has died, waits forever if rank 0 is missing, and needs gloo.
    """
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    deadline = time.monotonic() + _RESPONSE_SECONDS
    byte = torch.zeros(1, dtype=torch.uint8)
    works: dict[int, Any] = {}  # (send, receive): both are kept until the end
    for rank in others:
        with suppress(RuntimeError):
            sent = dist.isend(byte, rank, group=_long_group)
            works[rank] = (sent, dist.irecv(torch.empty_like(byte), rank, group=_long_group))

    def responds(rank: int) -> bool:
        with suppress(RuntimeError):
            return rank in works and bool(works[rank][1].wait(timedelta(seconds=_RESPONSE_SECONDS)))
        return False

    # Wait for all at once: a timeout closes every connection of the group.
    with ThreadPoolExecutor(len(others)) as pool:
        missing = [rank for rank, responded in zip(others, pool.map(responds, others), strict=True) if not responded]
    if missing:  # other ranks may still be waiting for this one's byte
        time.sleep(max(deadline - time.monotonic(), 0))
    return missing
