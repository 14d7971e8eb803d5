"""The device to compute on, and the threads of the CPU."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    raise UserError(f"there is no device {device!r} on this machine; choose auto or {', '.join(available)}")


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
def math_settings(device: torch.device | str, *, tf32: bool, deterministic: bool) -> Iterator[None]:
    """Run the block with these settings of torch, then restore the earlier ones.

    `tf32` lets NVIDIA GPUs multiply 32-bit matrices and convolve with 10 bits of mantissa; it does not affect a CPU.
    `deterministic` selects algorithms that give the same bits in every run; an operation without one prints a warning.
    Otherwise cuDNN measures which of its convolutions is the fastest.
    """
    backends: Any = torch.backends
    with contextlib.ExitStack() as stack:
        if torch.device(device).type == "cuda":
            for owner, name, value in [*_tf32_settings(tf32), (backends.cudnn, "benchmark", not deterministic)]:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        if deterministic:
            # cuBLAS reads it before its first product; with fixed workspaces its sums have one order.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            before = torch.are_deterministic_algorithms_enabled()
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Of the fused attention kernels, only flash attention has a deterministic backward pass.
            stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]))
        yield


def _tf32_settings(tf32: bool) -> list[tuple[Any, str, Any]]:
    """Return owner, name and value of torch's settings for TF32 in matrix products and convolutions."""
    backends: Any = torch.backends
    if hasattr(backends.cudnn, "conv"):  # torch 2.9 and later, which refuse a mix of both kinds of names
        precision = "tf32" if tf32 else "ieee"
        return [(owner, "fp32_precision", precision) for owner in (backends.cuda.matmul, backends.cudnn.conv)]
    return [(owner, "allow_tf32", tf32) for owner in (backends.cuda.matmul, backends.cudnn)]


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
