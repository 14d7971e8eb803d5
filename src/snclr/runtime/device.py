"""The device to compute on, and the threads of the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from snclr.errors import UserError

_SMALL = 2**22  # elements of a tensor: 256 images of 73 × 73 pixels


def available_devices() -> list[str]:
    """Return the devices of this machine by torch's names, the best first."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def pick_device(device: str) -> str:
    """Return the torch device for the value of a flag: "auto" is a GPU if there is one.

    >>> pick_device("cpu")
    'cpu'
    """
    available = available_devices()
    kinds = [name.partition(":")[0] for name in available]
    if device == "auto":
        return kinds[0]
    if device in available or device in kinds:
        return device
    if device.removesuffix(":0") in available:  # mps:0 is mps, cpu:0 is cpu
        return device.removesuffix(":0")
    raise UserError(f"there is no device {device!r} on this machine; choose auto or one of {', '.join(available)}")


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the copy; for a CUDA device through pinned memory.

    >>> to_device(torch.ones(2), "cpu")
    tensor([1., 1.])
    """
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@contextlib.contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Run the block with `count` torch threads; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(elements: int) -> contextlib.AbstractContextManager[None]:
    """Run operations on a small tensor with one thread.

    More threads hardly speed them up, and they wait for each other when the machine is busy.
    """
    return limit_threads(1 if elements < _SMALL else 0)
