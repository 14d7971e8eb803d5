"""Operations on features: normalization, precision, cosine similarity, all-gather with gradient."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.distributed.collectives import is_distributed, rank_and_size


def at_least_float32(features: Tensor) -> Tensor:
    """Convert half-precision features to float32; leave float32 and float64 unchanged."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def l2_normalize(features: Tensor) -> Tensor:
    """Scale the rows (N, D) to length 1, in float32 or float64.

    >>> l2_normalize(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    tensor([[0.6000, 0.8000]])
    """
    return F.normalize(at_least_float32(features), dim=1)


def autocast_disabled(features: Tensor) -> AbstractContextManager[object]:
    """Disable autocast on the device of `features`: cosines and their exponentials need float32."""
    device_type = features.device.type
    if not torch.amp.is_autocast_available(device_type):  # such as "meta", which has shapes only
        return nullcontext()
    return torch.autocast(device_type=device_type, enabled=False)


def own_rows(features: Tensor) -> Tensor:
    """Return the places (N,) of this rank's rows (N, D) among the gathered rows of all ranks."""
    return torch.arange(len(features), device=features.device) + rank_and_size()[0] * len(features)


def negative_cosine(z: Tensor, y: Tensor) -> Tensor:
    """Return −cos(z, y) of rows (N, D), averaged over the batch."""
    with autocast_disabled(z):
        return -F.cosine_similarity(at_least_float32(z), at_least_float32(y)).mean()


def all_gather_with_gradient(features: Tensor) -> Tensor:
    """Concatenate the rows (N, D) of all ranks to (N × world size, D); each row's gradient returns to its rank.

    There it is the sum over the losses of all ranks. Data parallelism divides by the world size, so a loss that is each
    rank's mean over its own rows, or equal on all ranks, gets the gradient of the whole batch.
    """
    if not is_distributed():
        return features
    from lightly.utils.dist import gather

    return torch.cat(gather(features.contiguous()))
