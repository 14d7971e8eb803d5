"""RandAugment (Cubuk et al., 2020) from given random numbers: two of fifteen operations per image.

The operations are those of torchvision on uint8 images; `PYCONTRAST` has the strengths of PyContrast, InfoMin's
official code. As there, the magnitude is normal with mean 10 and standard deviation 0.5, clipped to 10. Empty regions
are filled with the mean color. Each result depends on its own numbers alone.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_OPS = 2
NUMBERS = 4 * NUM_OPS  # per operation: whether, which, magnitude, sign

Operation = Callable[[Tensor, float, float], Tensor]  # image uint8 (3, H, W), magnitude in [0, 1], sign ±1


def _affine(
    x: Tensor, *, angle: float = 0, translate: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0),
    center: list[float] | None = None,
) -> Tensor:  # fmt: skip
    from torchvision.transforms.v2 import InterpolationMode, functional

    pixels = [round(part * x.shape[-1]) for part in translate]
    degrees = [math.degrees(math.atan(part)) for part in shear]
    return functional.affine(
        x, angle=angle, translate=pixels, scale=1.0, shear=degrees, interpolation=InterpolationMode.BILINEAR,
        fill=[124.0, 116.0, 104.0], center=center,
    )  # fmt: skip


def _library(name: str, x: Tensor, *arguments: float) -> Tensor:
    from torchvision.transforms.v2 import functional

    return getattr(functional, name)(x, *arguments)


OPERATIONS: dict[str, Operation] = {
    "auto contrast": lambda x, m, s: _library("autocontrast", x),
    "equalize": lambda x, m, s: _library("equalize", x),
    "invert": lambda x, m, s: _library("invert", x),
    "rotate": lambda x, m, s: _affine(x, angle=30 * m * s),
    "posterize": lambda x, m, s: _library("posterize", x, 8 - round(4 * m)),
    "solarize": lambda x, m, s: _library("solarize", x, 255 * (1 - m)),
    "solarize add": lambda x, m, s: torch.where(x < 128, (x.int() + round(110 * m)).clamp(max=255), x).to(x.dtype),
    "color": lambda x, m, s: _library("adjust_saturation", x, 1 + 0.9 * m * s),
    "contrast": lambda x, m, s: _library("adjust_contrast", x, 1 + 0.9 * m * s),
    "brightness": lambda x, m, s: _library("adjust_brightness", x, 1 + 0.9 * m * s),
    "sharpness": lambda x, m, s: _library("adjust_sharpness", x, 1 + 0.9 * m * s),
    "shear x": lambda x, m, s: _affine(x, shear=(0.3 * m * s, 0)),
    "shear y": lambda x, m, s: _affine(x, shear=(0, 0.3 * m * s)),
    "translate x": lambda x, m, s: _affine(x, translate=(0.45 * m * s, 0)),
    "translate y": lambda x, m, s: _affine(x, translate=(0, 0.45 * m * s)),
}


PYCONTRAST: dict[str, Operation] = {
    **OPERATIONS,
    # Levels are truncated, and the enhancing operations have no sign. At full strength, nothing is solarized.
    "posterize": lambda x, m, s: _library("posterize", x, int(4 * m)),
    "solarize": lambda x, m, s: torch.where(x.int() >= int(256 * m), 255 - x, x),
    "solarize add": lambda x, m, s: torch.where(x < 128, (x.int() + int(110 * m)).clamp(max=255), x).to(x.dtype),
    "color": lambda x, m, s: _library("adjust_saturation", x, 0.1 + 1.8 * m),
    "contrast": lambda x, m, s: _library("adjust_contrast", x, 0.1 + 1.8 * m),
    "brightness": lambda x, m, s: _library("adjust_brightness", x, 0.1 + 1.8 * m),
    "sharpness": lambda x, m, s: _library("adjust_sharpness", x, 0.1 + 1.8 * m),
    "shear x": lambda x, m, s: _affine(x, shear=(0.3 * m * s, 0), center=[0.0, 0.0]),
    "shear y": lambda x, m, s: _affine(x, shear=(0, 0.3 * m * s), center=[0.0, 0.0]),
}
"""The operations with the strengths of PyContrast, the code of InfoMin's authors."""


def rand_augment(
    x: Tensor, numbers: npt.NDArray[np.float64], probability: float, operations: dict[str, Operation] = OPERATIONS
) -> Tensor:
    """Transform images float (n, 3, H, W) in [0, 1] by numbers (n, NUMBERS) in [0, 1); `probability` per operation.

    >>> images = torch.rand(4, 3, 8, 8)
    >>> bool((rand_augment(images, np.full((4, NUMBERS), 0.9), probability=0.5) == images).all())
    True
    """
    changed = x.clone()
    for row in np.flatnonzero((numbers[:, ::4] < probability).any(axis=1)):
        image = x[row].mul(255).round().to(torch.uint8)
        for whether, which, strength, sign in numbers[row].reshape(NUM_OPS, 4):
            if whether < probability:
                operation = list(operations.values())[int(which * len(operations))]
                image = operation(image, _strength(strength), 1.0 if sign < 0.5 else -1.0)
        changed[row] = image.to(x.dtype).div(255)
    return changed


def _strength(number: float) -> float:
    """Return a normal magnitude (mean 10, standard deviation 0.5) clipped to [0, 10], divided by 10."""
    drawn = NormalDist(10, 0.5).inv_cdf(min(max(number, 1e-12), 1 - 1e-12))
    return min(max(drawn, 0.0), 10.0) / 10
