"""Average the gradients of all ranks during the backward pass, in a fixed order of summation.

torch's DistributedDataParallel rebuilds its buckets after the first backward pass. On three ranks or more, the first
step of a resumed run then rounds differently than the same step of an uninterrupted one. Here the buckets are fixed
when the module is set up. `RankStrategy` makes Fabric use it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn

from snclr.distributed.collectives import rank_and_size

BUCKET_BYTES = 25 * 2**20
"""Size of a message: large enough for the bandwidth, small enough to start while the backward pass still runs."""


class Bucket:
    """Parameters of one dtype and device whose gradients are sent in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        # Views with the strides of the parameters, so that a copy of a channels-last gradient permutes nothing.
        # `empty_like` has the strides of its argument, or contiguous ones if that has gaps or overlaps.
        parts = torch.split(self.flat, [p.numel() for p in self.parameters])
        self.views = [
            part.as_strided(p.size(), torch.empty_like(p, device="meta").stride(), part.storage_offset())
            for part, p in zip(parts, self.parameters, strict=True)
        ]
        self.missing = len(self.parameters)
        self.work: Any = None

    @torch.no_grad()
    def send(self, world_size: int) -> None:
        """Start the all-reduce of the gradients divided by the world size."""
        torch._foreach_copy_(self.views, self._gradients())
        self.flat.mul_(1.0 / world_size)
        self.work = dist.all_reduce(self.flat, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sums and write them to the gradients."""
        self.work.wait()
        torch._foreach_copy_(self._gradients(), self.views)
        self.work, self.missing = None, len(self.parameters)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class GradientAverager:
    """Replace the gradients of a module by their mean over the ranks, in buckets that are sent as they become complete.

    Buckets hold the parameters in reverse order, about the order in which a backward pass reaches them, and are sent in
    that order on every rank. Weights and buffers start as those of rank 0.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.enabled = True
        self._names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._buckets = [Bucket(part) for part in _split_into_buckets(reversed(list(self._names)), bucket_bytes)]
        self._sent = 0
        self._started = False
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                sent = tensor.contiguous()
                dist.broadcast(sent, src=0)
                tensor.copy_(sent)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = partial(self._on_gradient, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Only add up the gradients of this rank inside the block; a later backward pass averages their sum."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def finish(self) -> None:
        """Send what is left and wait until every gradient is the mean; call it after the backward pass."""
        if not self._started:
            return
        without = [name for parameter, name in self._names.items() if parameter.grad is None]
        if without:
            raise RuntimeError(f"parameters without a gradient, which every rank needs: {', '.join(without[:5])}")
        for bucket in self._buckets[self._sent :]:
            bucket.send(rank_and_size()[1])
        for bucket in self._buckets:
            bucket.receive()
        self._sent, self._started = 0, False

    def _on_gradient(self, bucket: Bucket, _parameter: Tensor) -> None:
        if not self.enabled:
            return
        self._started = True
        bucket.missing -= 1
        # All ranks must send in the same order, so a complete bucket waits for those before it.
        while self._sent < len(self._buckets) and self._buckets[self._sent].missing == 0:
            self._buckets[self._sent].send(rank_and_size()[1])
            self._sent += 1


class RankStrategy(DDPStrategy, _BackwardSyncControl):
    """One rank per device; `fabric.backward` returns when every gradient is the mean over the ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.averagers: dict[nn.Module, GradientAverager] = {}
        self._backward_sync_control = self

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # DDPStrategy's wraps it
        """Average the gradients of `module`, which is not wrapped."""
        self.averagers[module] = GradientAverager(module)
        return module

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass and wait for the means."""
        super().backward(tensor, module, *args, **kwargs)
        for averager in self.averagers.values():
            averager.finish()

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Do not average within the block if `enabled`; called by `fabric.no_backward_sync`."""
        return self.averagers[module].paused() if enabled else nullcontext()


def _split_into_buckets(parameters: Iterator[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield lists of consecutive parameters of one dtype and device, of at most `bucket_bytes` or one parameter."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.nbytes for p in part) + parameter.nbytes > bucket_bytes
        if part and (full or (part[0].dtype, part[0].device) != (parameter.dtype, parameter.device)):
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
