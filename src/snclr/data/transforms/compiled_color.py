"""The color stage as one function of (images, parameters) without rows to select, compiled by torch.compile.

It is compiled for NVIDIA and AMD GPUs. Each shape has its own kernels (`dynamic=False`), so that a resumed run computes
the same bits. The parameters have a row of numbers per image; an image that a transform does not change has its neutral
value. Brightness, contrast and saturation are one formula, x·f + gray(x)·g + mean·m with (f, g, m) per
image: 1 − f is g for saturation and m for contrast. Hue is applied once, with three such slots before and after it, so
that any order of the jitter is the same sequence of operations. `color` has the transforms one by one.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Planes = tuple[Tensor, Tensor, Tensor]  # red, green and blue, (n, H, W) each

_log = logging.getLogger(__name__)

_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_LUMA = (0.2989, 0.587, 0.114)
_SLOTS, _MEAN_SLOTS = 6, 4  # half of them before hue


def _around_hue(order: tuple[int, ...], count: int) -> list[int]:
    """Return the operation in each slot for an order of operations; −1: no operation."""
    at = order.index(_HUE) if _HUE in order else len(order)
    halves = [[*part, *[-1] * (count // 2 - len(part))] for part in (order[:at], order[at + 1 :])]
    return halves[0] + halves[1]


# For each of the 24 orders: the operation in each slot (24, 6), the same for the operations before contrast (24, 4),
# and whether hue is before contrast (24,).
_EVERY_ORDER = list(itertools.permutations(range(4)))
_BEFORE_CONTRAST = [order[: order.index(_CONTRAST)] for order in _EVERY_ORDER]
_ORDER_SLOTS = np.array([_around_hue(order, _SLOTS) for order in _EVERY_ORDER])
_ORDER_MEAN_SLOTS = np.array([_around_hue(order, _MEAN_SLOTS) for order in _BEFORE_CONTRAST])
_ORDER_HUE_FIRST = np.array([_HUE in order for order in _BEFORE_CONTRAST])
# Columns of the table.
_F, _G, _M = (slice(part * _SLOTS, (part + 1) * _SLOTS) for part in range(3))
_MEAN_F, _MEAN_G = (slice(18 + part * _MEAN_SLOTS, 18 + (part + 1) * _MEAN_SLOTS) for part in range(2))
_SHIFT, _HUE_ON, _HUE_IN_MEAN, _GRAY, _SOLARIZE = range(26, 31)
_WEIGHTS = 31


@dataclass(frozen=True)
class Steps:
    """Which transforms any image of a batch may have: the compiled function has only these, in this order."""

    jitter: bool = False
    contrast: bool = False
    gray: bool = False
    blur: bool = False
    solarize: bool = False


def parameter_table(
    orders: npt.NDArray[np.int64], factors: Floats, masks: Mapping[str, Mask], weights: Tensor
) -> Tensor:
    """Return the parameters (n, 31 + reach + 1), float32: `orders` (n,) from 0 to 23, jitter `factors` (n, 4).

    `masks` has the images (n,) with jitter, gray, solarize and blur; `weights` (rows, reach + 1) are those of
    `blur_weights` for the images with blur.
    """
    jittered = masks["jitter"]
    table = np.zeros((len(orders), _WEIGHTS + weights.shape[1]))
    for slots, f, g, m in ((_ORDER_SLOTS, _F, _G, _M), (_ORDER_MEAN_SLOTS, _MEAN_F, _MEAN_G, None)):
        part = np.where(jittered[:, None], slots[orders], -1)
        factor = np.where(part >= 0, np.take_along_axis(factors, np.maximum(part, 0), axis=1), 1.0)
        table[:, f] = factor
        table[:, g] = np.where(part == _SATURATION, 1 - factor, 0)
        if m is not None:
            table[:, m] = np.where(part == _CONTRAST, 1 - factor, 0)
    table[:, _SHIFT] = 6 * factors[:, _HUE]
    table[:, _HUE_ON] = jittered
    table[:, _HUE_IN_MEAN] = jittered & _ORDER_HUE_FIRST[orders]
    table[:, _GRAY] = masks["gray"]
    table[:, _SOLARIZE] = masks["solarize"]
    table[:, _WEIGHTS] = 1  # neutral: the center alone
    table[masks["blur"], _WEIGHTS:] = weights.numpy()
    return torch.from_numpy(table).float()


def fused_color(images: Tensor, table: Tensor, mean_scale: Tensor, steps: Steps, *, channels_last: bool) -> Tensor:
    """Return the images uint8 (n, 3, H, W) after the `steps`, normalized by mean_scale (2, 3), the
    means and the reciprocals of the standard deviations; float32."""
    red, green, blue = (images[:, channel].float() * (1 / 255) for channel in range(3))
    planes: Planes = (red, green, blue)
    mean = _mean_before_contrast(planes, table) if steps.contrast else None
    if steps.blur:  # reflect the pixels before the jitter: the sums over the taps then need no reflected indices
        reach = table.shape[1] - _WEIGHTS - 1
        planes = _each(planes, lambda plane: torch.nn.functional.pad(plane, (reach,) * 4, mode="reflect"))
    if steps.jitter:
        planes = _jitter(planes, table, mean)
    if steps.gray:
        on, gray = _wide(table[:, _GRAY]) > 0, _luma(planes)
        planes = _each(planes, lambda plane: torch.where(on, gray, plane))
    if steps.blur:  # from here on all channels at once: planes would need a pass of their own
        x = _blur_padded(torch.stack(planes, 1), table[:, _WEIGHTS:, None, None, None])
        x = _end(x, table[:, _SOLARIZE, None, None, None], mean_scale, steps)
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x
    red, green, blue = (
        _end(plane, _wide(table[:, _SOLARIZE]), mean_scale[:, channel : channel + 1], steps)
        for channel, plane in enumerate(planes)
    )
    if channels_last:
        return torch.stack([red, green, blue], 3).permute(0, 3, 1, 2)
    return torch.stack([red, green, blue], 1)


def _end(x: Tensor, solarize: Tensor, mean_scale: Tensor, steps: Steps) -> Tensor:
    """Solarize and normalize x, (n, H, W) or (n, 3, H, W)."""
    if steps.solarize:
        x = torch.where((solarize > 0) & (x >= 0.5), 1 - x, x)
    return (x - mean_scale[0, :, None, None]) * mean_scale[1, :, None, None]


def _jitter(planes: Planes, table: Tensor, mean: Tensor | None) -> Planes:
    """Apply brightness, contrast, saturation and hue in the order of each image; `mean` (n,) is for contrast."""
    for slot in range(_SLOTS):
        if slot == _SLOTS // 2:
            planes = _hue(planes, table[:, _SHIFT], table[:, _HUE_ON])
        added = None if mean is None else _wide(table[:, _M][:, slot] * mean)
        planes = _slot(planes, table[:, _F][:, slot], table[:, _G][:, slot], added)
    return planes


def _mean_before_contrast(planes: Planes, table: Tensor) -> Tensor:
    """Return the mean gray (n,) of the images as contrast finds them."""
    for slot in range(_MEAN_SLOTS):
        if slot == _MEAN_SLOTS // 2:
            planes = _hue(planes, table[:, _SHIFT], table[:, _HUE_IN_MEAN])
        planes = _slot(planes, table[:, _MEAN_F][:, slot], table[:, _MEAN_G][:, slot])
    gray = _luma(planes)
    # A sum of integers is the same in any order, as in color.contrast.
    fixed = (gray * 2**20).round().to(torch.int64)
    return fixed.sum(dim=(1, 2)).float() * (2.0**-20 / (gray.shape[1] * gray.shape[2]))


def _slot(planes: Planes, f: Tensor, g: Tensor, contrast: Tensor | None = None) -> Planes:
    """Return x·f + gray(x)·g + contrast, clamped."""
    added = _luma(planes) * _wide(g)
    if contrast is not None:
        added = added + contrast
    return _each(planes, lambda plane: (plane * _wide(f) + added).clamp(0, 1))


def _hue(planes: Planes, sixths: Tensor, on: Tensor) -> Planes:
    """Shift the hue of the images that are `on` (n,) by `sixths` (n,) of the color circle; as color.hue."""
    red, green, blue = planes
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    is_red, is_green = value == red, value == green
    difference = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    start = torch.where(is_red, 0.0, 4.0 - 2.0 * is_green)
    turn = difference / torch.where(chroma == 0, 1.0, chroma) + start + _wide(sixths)
    changed = _wide(on) > 0

    def channel(plane: Tensor, offset: float) -> Tensor:
        at = turn + offset
        at = at - 6 * torch.floor(at * (1 / 6))
        moved = value - chroma * torch.minimum(at, 4 - at).clamp(0, 1)
        return torch.where(changed, moved.clamp(0, 1), plane)

    return channel(red, 5.0), channel(green, 3.0), channel(blue, 1.0)


def _blur_padded(x: Tensor, weights: Tensor) -> Tensor:
    """Blur x, padded by reach on each side, with weights (n, reach + 1, 1, 1, 1) → (n, 3, H, W)."""
    reach = weights.shape[1] - 1
    for axis in (3, 2):
        size = x.shape[axis] - 2 * reach
        out = x.narrow(axis, reach, size) * weights[:, 0]
        for k in range(1, reach + 1):
            both = x.narrow(axis, reach - k, size) + x.narrow(axis, reach + k, size)
            out = out + both * weights[:, k]
        x = out
    return x


def _luma(planes: Planes) -> Tensor:
    red, green, blue = planes
    return red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]


def _each(planes: Planes, change: Callable[[Tensor], Tensor]) -> Planes:
    red, green, blue = (change(plane) for plane in planes)
    return red, green, blue


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


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
