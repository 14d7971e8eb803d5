"""Crop and resize: where a random crop lies, and two ways to cut it out that agree to one grey level.

`crop_picture` cuts one decoded picture of any size with Pillow (in a loader's worker). `crop_batch` cuts a whole batch
of equal-size images in memory by two matrix products. Both use the bicubic filter with antialiasing.
A box is int64 (top, left, height, width).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from snclr.data.decode import Picture

Boxes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TRIES = 10
CROP_NUMBERS = 2 * TRIES + 2  # random numbers that one box takes
_LOG_RATIO = np.log(4 / 3)  # aspect ratios from 3/4 to 4/3
_TABLE_NUMBERS = 2**21  # 16 MB; images of 32 × 32 take half of it
_MARGIN = 256 / 224  # an evaluation picture is scaled a little larger than its centre crop
_LONGEST = 4  # times the crop: a picture that would be longer is not scaled as a whole


def random_boxes(numbers: Floats, height: int, width: int, area: tuple[float, float]) -> Boxes:
    """Place one random crop a row: numbers (n, 22) in [0, 1) → boxes (n, 4), `area` being the share of the picture.

    As the usual random resized crop does: the first of ten random shapes that fits; failing all, a centred crop with
    the nearest allowed aspect ratio.
    """
    shares, ratios = numbers[:, :TRIES], numbers[:, TRIES : 2 * TRIES]
    pixels = height * width * (area[0] + (area[1] - area[0]) * shares)
    ratio = np.exp((2 * ratios - 1) * _LOG_RATIO)
    widths = np.rint(np.sqrt(pixels * ratio)).astype(np.int64)
    heights = np.rint(np.sqrt(pixels / ratio)).astype(np.int64)
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.argmax(axis=1)
    row = np.arange(len(numbers))
    # The fallback matters for long pictures, where a crop of most of the area cannot have an allowed ratio.
    found = fits[row, first]
    w = np.where(found, widths[row, first], min(width, max(1, round(height * 4 / 3))))
    h = np.where(found, heights[row, first], min(height, max(1, round(width * 4 / 3))))
    top_share, left_share = numbers[:, -2], numbers[:, -1]
    top = np.where(found, np.floor(top_share * (height - h + 1)), (height - h) // 2)
    left = np.where(found, np.floor(left_share * (width - w + 1)), (width - w) // 2)
    return np.stack([top, left, h, w], axis=1).astype(np.int64)


def crop_picture(picture: Picture, box: npt.NDArray[Any], flip: bool, size: int) -> Picture:
    """Cut one box out of a picture uint8 (H, W, 3), scaled to uint8 (size, size, 3), mirrored if asked."""
    top, left, height, width = (int(value) for value in box)
    image = Image.fromarray(picture).resize(
        (size, size), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    crop = np.array(image)
    return crop[:, ::-1] if flip else crop


def crop_batch(images: Picture, boxes: Boxes, flips: npt.NDArray[np.bool_], size: int) -> Tensor:
    """Cut one box out of each image: uint8 (n, H, W, 3) → uint8 tensor (n, 3, size, size).

    Interpolation is linear, so each axis is a matrix: out = A_y · image · A_xᵀ, rounded after each axis as Pillow does.
    """
    n, height, width, _ = images.shape
    a_x = _axis_matrices(boxes[:, 1], boxes[:, 3], width, size)
    a_x[flips] = a_x[flips, ::-1]
    a_y = _axis_matrices(boxes[:, 0], boxes[:, 2], height, size)
    planes = torch.tensor(images).permute(0, 3, 1, 2).to(torch.float64, memory_format=torch.contiguous_format)
    rows = torch.bmm(planes.view(n, 3 * height, width), torch.from_numpy(a_x).mT).round_().clamp_(0, 255)
    out = torch.matmul(torch.from_numpy(a_y)[:, None], rows.view(n, 3, height, size)).round_().clamp_(0, 255)
    return out.to(torch.uint8)


def centre_crop(picture: Picture, size: int) -> Picture:
    """Make the evaluation picture, uint8 (size, size, 3): short side to size · 256/224, then the centre.

    A picture no larger than `size` keeps its margin (its border is not to spare), and one of that size is untouched.

    >>> centre_crop(np.zeros((480, 640, 3), np.uint8), 224).shape
    (224, 224, 3)
    """
    height, width, _ = picture.shape
    if height == width == size:
        return picture
    short = min(height, width)
    target = int(size * _MARGIN) if short > size else size
    # The long side rounds down, as torchvision's Resize does.
    new_width, new_height = (max(target, int(target * side / short)) for side in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    image = Image.fromarray(picture)
    if max(new_width, new_height) > _LONGEST * size:
        # One pixel by a million would become size by a million sizes: only the centre is scaled. Not so for all, since
        # the two ways differ in rounding, and torchvision's, which accuracies are compared by, scales the whole.
        x, y = width / new_width, height / new_height
        box = (left * x, top * y, (left + size) * x, (top + size) * y)
        return np.array(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    image = image.resize((new_width, new_height), Image.Resampling.BICUBIC)
    return np.array(image.crop((left, top, left + size, top + size)))


def _axis_matrices(start: Boxes, length: Boxes, inside: int, outside: int) -> Floats:
    """Return the interpolation matrices (n, outside, inside) of crops [start, start + length) along one axis.

    Small images have so few different crops that all their matrices are kept, computed once.
    """
    if inside**3 * outside > _TABLE_NUMBERS:
        return _compute_matrices(start, length, inside, outside)
    every: Floats = _all_matrices(inside, outside)[start * inside + length - 1]
    return every


@functools.lru_cache(maxsize=2)
def _all_matrices(inside: int, outside: int) -> Floats:
    """Return the matrices of every start and length, the latter from 1: (inside · inside, outside, inside)."""
    start, length = np.divmod(np.arange(inside * inside), inside)
    return _compute_matrices(start, length + 1, inside, outside)


def _compute_matrices(start: Boxes, length: Boxes, inside: int, outside: int) -> Floats:
    """Compute interpolation matrices (n, outside, inside).

    Weights are multiples of 2^-24. A product with 8-bit pixels is then exact in float64 whatever the order of its sums,
    so that an image's crop never depends on the batch it is in, nor on the number of threads.
    """
    scale = (length / outside)[:, None, None]
    stretch = np.maximum(scale, 1)  # antialiasing: shrinking widens the filter
    centre = start[:, None, None] + (np.arange(outside)[:, None] + 0.5) * scale
    weights = _bicubic((np.arange(inside) + 0.5 - centre) / stretch)
    total = weights.sum(axis=2, keepdims=True)
    weights *= 2**24 / np.where(total > 0, total, 1)  # nothing, for a crop that starts in the image and ends beyond it
    np.rint(weights, out=weights)
    # What rounding lost goes to the largest weight, so that a flat image stays flat.
    rest = 2**24 - weights.sum(axis=2, keepdims=True)
    largest = weights.argmax(axis=2, keepdims=True)
    np.put_along_axis(weights, largest, np.take_along_axis(weights, largest, axis=2) + rest, axis=2)
    return weights * 2.0**-24


def _bicubic(x: Floats) -> Floats:
    """Evaluate Keys' cubic filter with a = -1/2, as Pillow does."""
    x = np.minimum(np.abs(x), 2)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, far)
