"""Activation checkpointing: keep only the input of each block of an encoder, and recompute the rest when needed."""

from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snclr.errors import UserError


def checkpoint_activations(encoder: Any, name: str) -> None:
    """Make `encoder` recompute the activations of its blocks in the backward pass; gradients stay the same.

    timm's models have `set_grad_checkpointing`; in a torchvision ResNet, every residual block is recomputed. `name` is
    for the error message.
    """
    from torchvision.models import ResNet

    if isinstance(encoder, ResNet):
        for stage in (encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4):
            for block in stage:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    else:
        try:
            encoder.set_grad_checkpointing(True)
        except (AttributeError, AssertionError, NotImplementedError) as error:
            raise UserError(
                f"{name} does not support --activation-checkpointing. Omit it, or choose a torchvision ResNet or"
                " another timm model such as vit_small."
            ) from error
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm):
            hooks = _UpdateOnce()
            layer.register_forward_pre_hook(hooks.before)
            # Also after an exception: torch ends the recomputation by one, which may come from inside the layer.
            layer.register_forward_hook(hooks.after, always_call=True)


class _UpdateOnce:
    """Hooks of a batch norm: a recomputation in the backward pass does not update the running statistics again."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def before(self, layer: Any, _inputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # in a backward pass; torch.utils.checkpoint tests it this way
            self._kept = layer.momentum, layer.num_batches_tracked
            layer.momentum, layer.num_batches_tracked = 0.0, None

    def after(self, layer: Any, _inputs: Any, _output: Any) -> None:
        if self._kept is not None:
            layer.momentum, layer.num_batches_tracked = self._kept
            self._kept = None
