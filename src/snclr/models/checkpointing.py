"""Activation checkpointing: keep only the input of each block of an encoder, and compute the rest again when needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snclr.errors import UserError


def checkpoint_activations(encoder: nn.Module, name: str) -> None:
    """Make `encoder` compute the activations of its blocks again in the backward pass; gradients stay the same.

    timm's models have a switch for it; in a torchvision ResNet, every residual block is a checkpoint.
    """
    from torchvision.models import ResNet

    if isinstance(encoder, ResNet):
        for stage in (encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4):
            for block in stage:
                block.forward = partial(_checkpointed, block.forward)
    else:
        _switch_on(encoder, name)
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm):
            paused = _PausedStatistics()
            layer.register_forward_pre_hook(paused.before)
            # Also after an exception: torch ends the second pass by one, which may come from inside the layer.
            layer.register_forward_hook(paused.after, always_call=True)


def _checkpointed(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False)


def _switch_on(encoder: Any, name: str) -> None:
    """Use timm's switch; raise UserError if the model has none."""
    try:
        encoder.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"{name} does not support --activation-checkpointing. Omit it, or choose a torchvision ResNet or another"
            " timm model such as vit_small."
        ) from error


class _PausedStatistics:
    """Hooks of a batch norm: a pass within a backward pass is a second one and leaves the running statistics alone."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def before(self, layer: Any, _inputs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs; torch.utils.checkpoint asks so too
            return
        self._kept = layer.momentum, layer.num_batches_tracked
        layer.momentum, layer.num_batches_tracked = 0.0, None

    def after(self, layer: Any, _inputs: Any, _output: Any) -> None:
        if self._kept is not None:
            layer.momentum, layer.num_batches_tracked = self._kept
            self._kept = None
