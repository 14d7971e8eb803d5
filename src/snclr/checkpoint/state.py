"""Everything a run needs to resume, as a flat dict of tensors.

The sampler, the transforms, the schedules and all random numbers are functions of the settings and the step, so only
the method and the optimizer are saved.
"""

import torch
from torch import Tensor, nn

from snclr.errors import UserError


def collect_state(method: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the trained module (a method: encoders, heads, queue) and of the optimizer."""
    tensors = {f"method/{name}": value for name, value in method.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items()}
    return tensors


def restore_state(tensors: dict[str, Tensor], method: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `collect_state` returned.

    Files hold contiguous tensors. Every moment gets the strides of its parameter, as the optimizer creates it: with
    others, an update is slower and cannot be fused.
    """
    load_method_state(tensors, method)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in _below("optimizer/", tensors).items():
        index, name = key.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def load_method_state(tensors: dict[str, Tensor], method: nn.Module) -> None:
    """Load the tensors of the method only."""
    try:
        method.load_state_dict(_below("method/", tensors))
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit the settings of the run: {error}") from error


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
