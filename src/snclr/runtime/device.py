"""Where to compute, from what a person typed."""

from __future__ import annotations

import torch

from snclr.errors import UserError


def devices_here() -> list[str]:
    """The devices of this machine, as torch calls them, the one that `auto` means first."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def pick_device(device: str) -> str:
    """`auto` is a GPU where there is one, as in training; what is not on this machine is refused.

    >>> pick_device("cpu")
    'cpu'
    """
    here = devices_here()
    kinds = [name.partition(":")[0] for name in here]
    if device == "auto":
        return kinds[0]
    if device in here or device in kinds:
        return device
    if device.endswith(":0") and device[:-2] in here:  # mps:0 is mps, cpu:0 is cpu
        return device[:-2]
    raise UserError(f"there is no device {device!r} on this machine; give auto, or one that is: {', '.join(here)}")
