"""All that is resumable, in one list: a flat dict of tensors and a small dict of plain values.

Nothing else of a run needs saving: the order of the images, the views, the learning rate and the random numbers of a
step are pure functions of the settings and the step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError


def collect(method: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The method (encoders, heads, queue) and the optimiser as tensors, and the optimiser's plain values."""
    tensors = {f"method/{name}": value for name, value in method.state_dict().items()}
    plain: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = value
            else:
                plain[f"{index}/{name}"] = value
    return tensors, plain


def restore(
    tensors: dict[str, Tensor], plain: dict[str, Any], method: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Put back what `collect` took."""
    load_method_state(tensors, method)
    state: dict[int, dict[str, Any]] = {}
    entries = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
    for key, value in {**entries, **plain}.items():
        index, name = key.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_method_state(tensors: dict[str, Tensor], method: nn.Module) -> None:
    """Put back the method's part alone."""
    saved = {name.removeprefix("method/"): t for name, t in tensors.items() if name.startswith("method/")}
    try:
        method.load_state_dict(saved)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit the settings of the run: {error}") from error


def digest(tensors: dict[str, Tensor], step: int) -> str:
    """sha256 over every tensor's name, type, shape and bytes, and the step: equal only for bit-identical states."""
    total = hashlib.sha256(str(step).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
