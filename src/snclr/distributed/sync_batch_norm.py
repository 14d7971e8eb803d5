"""Batch norm with the statistics of all ranks, so that the result does not depend on their number.

torch's SyncBatchNorm supports GPUs only, drops the activation of timm's norm layers, and waits for the GPU in every
layer, because it allows ranks without images. On a GPU, the layer here calls the same fused kernels. On the CPU it
computes, with n values of a channel over all ranks, x̂ = (x − μ) / √(σ² + ε) and g = ∂L/∂y:

    forward   μ = Σ n_r μ_r / n,  σ² = Σ n_r (σ²_r + (μ_r − μ)²) / n       from n_r, μ_r, σ²_r of each rank r
    backward  ∂L/∂x = w / √(σ² + ε) · (g − Σg / n − x̂ Σ(g x̂) / n)         from Σg, Σ(g x̂) of each rank

The gradients of weight and bias are this rank's own; they are averaged as all others.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snclr.distributed.collectives import all_gather, all_reduce_sum, is_distributed

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def synchronize_batch_norm(module: ModuleT) -> ModuleT:
    """Synchronize every batch norm of `module`, which keeps its parameters, buffers and keys; return the module.

    Call it after moving the module to its device. On a single rank nothing changes.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> synchronize_batch_norm(net) is net
    True
    """
    if not is_distributed():
        return module
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.__class__ = SyncBatchNorm
    return module


class SyncBatchNorm(_BatchNorm):
    """A batch norm over (N, C, ...) whose training statistics are those of all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept (N, C, ...); torch's layers of 1 to 3 dimensions differ in this check alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of all ranks in training, with the running ones in evaluation."""
        output = self._normalize(input) if self.training and is_distributed() else super().forward(input)
        for part in ("drop", "act"):  # of timm's BatchNormAct2d
            output = getattr(self, part, nn.Identity())(output)
        return output

    def _normalize(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of all ranks and update the running statistics."""
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the cumulative mean
                momentum = 1.0 / float(self.num_batches_tracked)
        if input.device.type != "cpu":
            running = (self.running_mean, self.running_var)
            return _FusedNormalize.apply(input, self.weight, self.bias, running, momentum, self.eps)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        self._update_running_statistics(mean, variance, count, momentum)
        return output

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, count: Tensor, momentum: float) -> None:
        """Update the running statistics as torch does, with the unbiased variance."""
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running), alpha=momentum)


class _Normalize(torch.autograd.Function):
    """The training formula: return the output, mean (C,), biased variance (C,) and count () over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = _dims_and_shape(x)
        values = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision would lose small terms of the sums
        variance, mean = torch.var_mean(values, dims, correction=0)
        local_count = values.new_full((1,), x.numel() // x.shape[1])
        # One message, because its latency exceeds its transfer time.
        gathered = all_gather(torch.cat([local_count, mean, variance])[None])
        counts, means, variances = torch.split(gathered, [1, x.shape[1], x.shape[1]], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normalized = (values - mean.view(shape)).mul_(inverse.view(shape))
        ctx.save_for_backward(normalized, weight, inverse, count)
        output = normalized.clone() if weight is None else normalized * weight.view(shape)
        if bias is not None:
            output += bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normalized, weight, inverse, count = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        dims, shape = _dims_and_shape(gradient)
        sum_g, sum_gx = gradient.sum(dims), (gradient * normalized).sum(dims)
        mean_g, mean_gx = (all_reduce_sum(torch.cat([sum_g, sum_gx])) / count).chunk(2)
        scale = inverse if weight is None else inverse * weight
        x_gradient = (gradient - mean_g.view(shape) - normalized * mean_gx.view(shape)) * scale.view(shape)
        weight_gradient, bias_gradient = (sum_gx, sum_g) if weight is not None else (None, None)
        return x_gradient.to(gradients[0].dtype), weight_gradient, bias_gradient, None


class _FusedNormalize(torch.autograd.Function):
    """The same formula by torch's fused GPU kernels, which also update the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor | None, Tensor | None],
        momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        x = _dense(x)
        mean, inverse = torch.batch_norm_stats(x, eps)
        local_count = mean.new_full((1,), x.numel() // x.shape[1])
        gathered = all_gather(torch.cat([local_count, mean, inverse])[None])
        counts, means, inverses = torch.split(gathered, [1, x.shape[1], x.shape[1]], dim=1)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, means.contiguous(), inverses.contiguous(), *running, momentum, eps, counts.reshape(-1)
        )
        ctx.save_for_backward(x, weight, mean, inverse, counts.reshape(-1).to(torch.int32))
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        gradient = _dense(gradients[0])
        needed = ctx.needs_input_grad[:3]
        sum_g, sum_gx, w_gradient, b_gradient = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse, weight, *needed
        )
        x_gradient = None
        if needed[0]:
            sum_g, sum_gx = all_reduce_sum(torch.cat([sum_g, sum_gx])).chunk(2)
            x_gradient = torch.batch_norm_backward_elemt(gradient, x, mean, inverse, weight, sum_g, sum_gx, counts)
        affine = weight is not None
        return x_gradient, w_gradient if affine else None, b_gradient if affine else None, None, None, None


def _dense(x: Tensor) -> Tensor:
    """Return x in channels-last or contiguous memory, as the fused kernels require."""
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if channels_last else x.contiguous()


def _dims_and_shape(x: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Return all dims of x (N, C, ...) except that of the channels, and the shape that broadcasts (C,) over x."""
    return [0, *range(2, x.ndim)], (1, x.shape[1], *(1,) * (x.ndim - 2))
