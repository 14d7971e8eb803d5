"""What the pages share about features: unit length, full precision, the rows of every process with their gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.distributed import is_distributed


def unit(features: Tensor) -> Tensor:
    """Rows (N, D) of length 1, in float32 or better.

    >>> unit(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    tensor([[0.6000, 0.8000]])
    """
    return F.normalize(precise(features), dim=1)


def precise(features: Tensor) -> Tensor:
    """The same numbers in float32, or in float64 where they are."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def full_precision(features: Tensor) -> AbstractContextManager[object]:
    """Without autocast on the device of `features`: cosines and their exponentials want full precision."""
    return torch.autocast(device_type=features.device.type, enabled=False)


def gather_with_gradient(features: Tensor) -> Tensor:
    """Rows (N, D) of all processes in rank order, (N × processes, D); each row's gradient goes back to its process.

    There it is the sum over the processes' losses. Data parallelism then divides by their number, so that a loss which
    is each process's mean over its own rows, or the same number on all of them, gets the gradient of the whole batch.
    """
    if not is_distributed():
        return features
    from lightly.utils.dist import gather

    return torch.cat(gather(features.contiguous()))
