"""Layers and inputs for the test of synchronized batch norm. Ranks get different numbers of rows."""

import torch
from timm.layers import BatchNormAct2d
from torch import nn

CASES = {
    "images": (lambda: nn.BatchNorm2d(3), (11, 3, 4, 5)),
    "channels last": (lambda: nn.BatchNorm2d(3), (11, 3, 4, 5)),
    "rows": (lambda: nn.BatchNorm1d(6), (9, 6)),
    "no scale": (lambda: nn.BatchNorm1d(6, affine=False), (9, 6)),
    "cumulative": (lambda: nn.BatchNorm1d(6, momentum=None, eps=0.1), (9, 6)),
    "no statistics": (lambda: nn.BatchNorm2d(2, track_running_stats=False), (7, 2, 3, 3)),
    "timm norm and activation": (lambda: BatchNormAct2d(3), (11, 3, 4, 5)),
}


def build(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the layer, its input and the weights of a linear loss, in double precision."""
    make, shape = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    norm = make().double()
    with torch.no_grad():
        for part in norm.parameters():
            part.copy_(torch.rand(part.shape, generator=generator, dtype=torch.float64) + 0.5)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 1 for _ in range(2))
    if name == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    return norm, x, weight


def rows_of(count: int, rank: int, size: int) -> slice:
    """Return the rows of a rank: one for each rank, the rest for rank 0."""
    bounds = [0, *(count - size + rank + 1 for rank in range(size))]
    return slice(bounds[rank], bounds[rank + 1])
