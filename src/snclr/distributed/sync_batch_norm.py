"""Batch norm with the statistics of all processes: one result, however many share the batch.

torch's own SyncBatchNorm does this on GPUs and refuses the CPU; the layer here is for the CPU. With n values of a
channel over all processes, x̂ = (x − μ) / √(σ² + ε) and g = ∂L/∂y:

    forward   μ = Σ n_r μ_r / n,  σ² = Σ (n_r σ²_r + n_r (μ_r − μ)²) / n    from each process's n_r, μ_r, σ²_r
    backward  ∂L/∂x = w / √(σ² + ε) · (g − Σg / n − x̂ Σ(g x̂) / n)         from each process's Σg, Σ(g x̂)

The gradients of scale and shift stay this process's own: they are averaged with all others, as every gradient is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snclr.distributed.collectives import all_gather, all_reduce_sum, is_distributed

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def synchronize_batch_norm(module: ModuleT) -> ModuleT:
    """Replace each batch norm by a synchronized one with the same parameters, buffers and keys, where processes share.

    Each takes the kind its device has when it is called: convert after moving to a GPU.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> synchronize_batch_norm(net) is net  # alone, nothing changes
    True
    """
    if not is_distributed():
        return module
    if any(parameter.is_cuda for parameter in module.parameters()):
        converted: ModuleT = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return converted
    return _convert(module)


def _convert(module: Any) -> Any:
    if isinstance(module, _BatchNorm) and not isinstance(module, CpuSyncBatchNorm):
        return CpuSyncBatchNorm.taking_over(module)
    for name, child in module.named_children():
        setattr(module, name, _convert(child))
    return module


class CpuSyncBatchNorm(_BatchNorm):
    """A batch norm over (N, C, ...) whose training statistics are those of all processes."""

    @classmethod
    def taking_over(cls, norm: _BatchNorm) -> CpuSyncBatchNorm:
        """The same parameters and buffers (not copies) in a synchronized layer."""
        layer = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            device=torch.device("meta"),
        )
        layer._parameters, layer._buffers = norm._parameters, norm._buffers
        layer.training = norm.training
        return layer

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes (N, C, ...), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of all processes in training, with the running ones in evaluation."""
        if not (self.training and is_distributed()):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        self._follow(mean, variance, count)
        return output

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics, as torch does: the variance there is the unbiased one."""
        if not self.track_running_stats:
            return
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None  # noqa: PT018
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.mul_(1 - share).add_(mean.to(self.running_mean), alpha=share)
        self.running_var.mul_(1 - share).add_(unbiased.to(self.running_var), alpha=share)


class _Normalize(torch.autograd.Function):
    """Batch norm's training formula with sums over all processes: output, mean (C,), biased variance (C,), count ()."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = _other_dims(x), _channel_shape(x)
        # In the layer's own precision or better: half precision would lose the small sums.
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(values, dims, correction=0)
        own = values.new_tensor([x.numel() // x.shape[1]])
        # All at once: a message costs the same whether it holds one number or a thousand.
        of_all = all_gather(torch.cat([own, mean, variance])[None])
        counts, means, variances = torch.split(of_all, [1, x.shape[1], x.shape[1]], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normalized = (values - mean.view(shape)).mul_(inverse.view(shape))
        ctx.save_for_backward(normalized, weight, inverse, count)
        output = normalized if weight is None else normalized * weight.view(shape)
        output = (output.clone() if weight is None else output) if bias is None else output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normalized, weight, inverse, count = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        dims, shape = _other_dims(gradient), _channel_shape(gradient)
        sum_g, sum_gx = gradient.sum(dims), (gradient * normalized).sum(dims)
        both = all_reduce_sum(torch.cat([sum_g, sum_gx])) / count
        mean_g, mean_gx = both.chunk(2)
        scale = inverse if weight is None else inverse * weight
        x_gradient = (gradient - mean_g.view(shape) - normalized * mean_gx.view(shape)) * scale.view(shape)
        return (
            x_gradient.to(gradients[0].dtype),
            sum_gx if ctx.needs_input_grad[1] else None,
            sum_g if ctx.needs_input_grad[2] else None,
            None,
        )


def _other_dims(x: Tensor) -> list[int]:
    """Every dim but the channels'."""
    return [0, *range(2, x.ndim)]


def _channel_shape(x: Tensor) -> tuple[int, ...]:
    """How a value a channel (C,) is spread over x (N, C, ...)."""
    return (1, x.shape[1], *(1,) * (x.ndim - 2))
