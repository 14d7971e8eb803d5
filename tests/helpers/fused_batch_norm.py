"""The CUDA-only kernels of synchronized batch norm, from their definition, for the pretended device."""

from __future__ import annotations

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.ndim - 2))


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), _dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    variances = inverses.pow(-2) - eps
    count, share = counts.sum(), counts[:, None] / counts.sum()
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
        running_var.lerp_((variance * count / (count - 1)).to(running_var), momentum)
    return mean, (variance + eps).rsqrt()


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    y = (x - _wide(mean, x)) * _wide(inverse, x)
    y = y if weight is None else y * _wide(weight, x)
    y = y if bias is None else y + _wide(bias, x)
    return y.to(x.dtype).contiguous(memory_format=_format(x))


def backward_reduce(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = g.to(mean.dtype)
    sum_g, sum_gx = g.sum(_dims(x)), (g * (x - _wide(mean, x))).sum(_dims(x))
    return sum_g, sum_gx, sum_gx * inverse, sum_g.clone()


def backward_elemt(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, sum_g: Tensor, sum_gx: Tensor,
    counts: Tensor,
) -> Tensor:  # fmt: skip
    count = counts.sum()
    centered = g - _wide(sum_g / count, x) - (x - _wide(mean, x)) * _wide(inverse.square() * sum_gx / count, x)
    scaled = centered * _wide(inverse if weight is None else inverse * weight, x)
    return scaled.to(x.dtype).contiguous(memory_format=_format(x))


def _format(x: Tensor) -> torch.memory_format:
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}
