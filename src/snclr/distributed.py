"""The only place that talks to torch.distributed: what a training step needs of the other processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes: (0, 1) when alone."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


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
