"""The contrastive loss (InfoNCE) of SNCLR's Eq. 1 and of MoCo v3, computed in tiles."""

from __future__ import annotations

from torch import Tensor

from snclr.errors import UserError
from snclr.methods.common import kernels


def contrastive_loss(
    z1: Tensor, y2: Tensor, *, tau: float = 0.2, batch_y2: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Eq. 1: −log [ exp(z1·y2/τ) / Σ_m exp(z1·y2_m/τ) ], InfoNCE with the other y2 of the batch as negatives.

    All features are L2-normalized rows (N, D). `batch_y2` (B, D) is y2 of all ranks, this rank's rows included; default
    y2.
    """
    keys = kernels.Keys(y2 if batch_y2 is None else batch_y2)
    return reduce_rows(kernels.logsumexp(z1, [keys], tau) - (z1 * y2).sum(dim=1) / tau, reduction)


def reduce_rows(loss: Tensor, reduction: str) -> Tensor:
    """Return the mean of the losses of the rows (N,), or the losses themselves."""
    if reduction not in ("mean", "none"):
        raise UserError(f"reduction must be 'mean' or 'none', not {reduction!r}")
    return loss.mean() if reduction == "mean" else loss
