"""Everything a run needs to resume, as a flat dict of tensors and a small dict of plain values.

The sampler, the transforms, the schedules and all random numbers are functions of the settings and the step, so only
the method and the optimizer are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError


def collect(method: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the method (encoders, heads, queue) and the optimizer, and the optimizer's plain values."""
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
    """Load what `collect` returned."""
    load_method_state(tensors, method)
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**_below("optimizer/", tensors), **plain}.items():
        index, name = key.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_method_state(tensors: dict[str, Tensor], method: nn.Module) -> None:
    """Load the tensors of the method only."""
    try:
        method.load_state_dict(_below("method/", tensors))
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit the settings of the run: {error}") from error


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
