"""Fabric's strategy for several ranks, with our averaging of gradients instead of DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn

from snclr.distributed.gradients import GradientAverager


class RankStrategy(DDPStrategy):
    """One rank per device; `fabric.backward` returns when every gradient is the mean over the ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.averagers: dict[nn.Module, GradientAverager] = {}
        self._backward_sync_control = _PauseAveraging(self)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # DDPStrategy's wraps it
        """Average the gradients of `module`, which is not wrapped."""
        self.averagers[module] = GradientAverager(module)
        return module

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass and wait for the means."""
        super().backward(tensor, module, *args, **kwargs)
        for averager in self.averagers.values():
            averager.finish()


class _PauseAveraging(_BackwardSyncControl):
    """The pause of the averaging behind `fabric.no_backward_sync`."""

    def __init__(self, strategy: RankStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.averagers[module].paused() if enabled else nullcontext()
