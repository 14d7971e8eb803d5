"""`fused_color` compiled by torch.compile for NVIDIA and AMD GPUs, or None if it cannot be compiled.

Each shape has its own kernels (`dynamic=False`), so that a resumed run computes the same
bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snclr.data.transforms.fused_color import Steps, fused_color

_log = logging.getLogger(__name__)

COMPILED_DEVICES = {"cuda"}
"""Types of devices on which the color stage is compiled; others run it transform by transform."""
OPTIONS = {
    # Store the channels with one kernel that computes a pixel once, not once per channel.
    "max_pointwise_cat_inputs": 0,
    "max_complex_pointwise_cat_inputs": 0,
    # Sum all taps of the blur in one kernel.
    "realize_acc_reads_threshold": 10**6,
    "realize_opcount_threshold": 10**6,
    # Compile in this process: four kernels need no pool of workers.
    "compile_threads": 1,
}
"""Options of inductor; those that a version of torch does not have are left out."""
_failed: set[tuple[object, ...]] = set()  # device types, shapes and steps that cannot be compiled


def can_compile(device: torch.device) -> bool:
    """Return whether the color stage is compiled on the device; TORCH_COMPILE_DISABLE=1 prevents it."""
    if device.type not in COMPILED_DEVICES:
        return False
    import torch._dynamo

    return not torch._dynamo.config.disable


def compiled_color(
    images: Tensor, table: Tensor, mean_scale: Tensor, steps: Steps, *, channels_last: bool
) -> Tensor | None:
    """Return `fused_color` of the arguments; None, with one warning, if it cannot be compiled here."""
    case = (images.device.type, images.shape, steps, channels_last)
    if case in _failed:
        return None
    try:
        return _compiled()(images, table, mean_scale, steps, channels_last=channels_last)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of dynamo, inductor, triton or a C compiler, each with exceptions of its own
        if not _failed:
            _log.warning(
                "the color stage cannot be compiled (%s: %s), so it runs transform by transform, which is slower",
                type(error).__name__,
                str(error).strip().partition("\n")[0][:200],
            )
        _failed.add(case)
        return None


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(fused_color, fullgraph=True, dynamic=False, options=known_options())


def known_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Return the OPTIONS of this version of inductor."""
    import torch._inductor

    known = set(torch._inductor.list_options())
    return {name: value for name, value in OPTIONS.items() if name in known}
