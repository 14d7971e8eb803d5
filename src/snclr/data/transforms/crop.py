"""Random resized crops and center crops, with the bicubic filter and antialiasing.

`crop_image` crops one image of any size with Pillow, in a dataloader worker. `crop_batch` crops a batch of equal-size
images in memory with two matrix products. Both agree to one gray level. A box is int64 (top, left, height, width).
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from snclr.data.decode import RGBImage

Boxes = npt.NDArray[np.int64]
Sides = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TRIES = 10
CROP_NUMBERS = 2 * TRIES + 2  # random numbers per box
_LOG_RATIO = np.log(4 / 3)  # aspect ratios from 3/4 to 4/3
_TABLE_NUMBERS = 2**21  # 16 MB; half of it for 32 × 32 images
CENTER_CROP_MARGIN = 256 / 224  # resize relative to the center crop
_LONGEST = 4  # times the crop size; longer images are not resized as a whole


def random_boxes(numbers: Floats, height: int | Sides, width: int | Sides, area: tuple[float, float]) -> Boxes:
    """Return one random crop per row: numbers (n, 22) in [0, 1) → boxes (n, 4); `area` is the range of area shares.

    `height` and `width` are those of all images, or (n,). Like RandomResizedCrop: the first of ten random shapes that
    fits, or else a center crop with the nearest allowed aspect ratio.
    """
    height, width = np.reshape(height, (-1, 1)), np.reshape(width, (-1, 1))
    shares, ratios = numbers[:, :TRIES], numbers[:, TRIES : 2 * TRIES]
    pixels = height * width * (area[0] + (area[1] - area[0]) * shares)
    ratio = np.exp((2 * ratios - 1) * _LOG_RATIO)
    widths, heights = np.rint(np.sqrt(pixels * ratio)), np.rint(np.sqrt(pixels / ratio))
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.argmax(axis=1, keepdims=True)
    found, w, h = (np.take_along_axis(each, first, axis=1) for each in (fits, widths, heights))
    # The fallback is used for elongated images, where a large crop cannot have an allowed ratio.
    w = np.where(found, w, np.minimum(width, np.maximum(1, np.rint(height * 4 / 3))))
    h = np.where(found, h, np.minimum(height, np.maximum(1, np.rint(width * 4 / 3))))
    top = np.where(found, np.floor(numbers[:, -2:-1] * (height - h + 1)), (height - h) // 2)
    left = np.where(found, np.floor(numbers[:, -1:] * (width - w + 1)), (width - w) // 2)
    return np.concatenate([top, left, h, w], axis=1).astype(np.int64)


def crop_image(image: RGBImage, box: npt.NDArray[Any], flip: bool, size: int) -> RGBImage:
    """Crop one box of an image uint8 (H, W, 3), resize it to uint8 (size, size, 3), and flip it if `flip`."""
    top, left, height, width = (int(value) for value in box)
    resized = Image.fromarray(image).resize(
        (size, size), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    return np.array(resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else resized)


def crop_batch(images: RGBImage, boxes: Boxes, flips: npt.NDArray[np.bool_], size: int) -> Tensor:
    """Crop and resize one box of each image: uint8 (n, H, W, 3) → uint8 tensor (n, 3, size, size).

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


def center_crop(image: RGBImage, size: int) -> RGBImage:
    """Return the evaluation view, uint8 (size, size, 3): short side resized to size · 256/224, then a center crop.

    Images with a short side of at most `size` are resized to `size`, without that margin.

    >>> center_crop(np.zeros((480, 640, 3), np.uint8), 224).shape
    (224, 224, 3)
    """
    height, width, _ = image.shape
    if height == width == size:
        return image
    short = min(height, width)
    target = int(size * CENTER_CROP_MARGIN) if short > size else size
    # The long side rounds down, as torchvision's Resize does.
    new_width, new_height = (max(target, int(target * side / short)) for side in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    pil = Image.fromarray(image)
    if max(new_width, new_height) > _LONGEST * size:
        # Resizing a very long image as a whole would exhaust the memory, so only the center is resized. Other images
        # are resized as a whole like in torchvision, since the two ways differ in rounding.
        x, y = width / new_width, height / new_height
        box = (left * x, top * y, (left + size) * x, (top + size) * y)
        return np.array(pil.resize((size, size), Image.Resampling.BICUBIC, box=box))
    pil = pil.resize((new_width, new_height), Image.Resampling.BICUBIC)
    return np.array(pil.crop((left, top, left + size, top + size)))


def _axis_matrices(start: Boxes, length: Boxes, inside: int, outside: int) -> Floats:
    """Return the interpolation matrices (n, outside, inside) of crops [start, start + length) along one axis.

    The matrices of small images are precomputed for all crops.
    """
    if inside**3 * outside > _TABLE_NUMBERS:
        return _compute_matrices(start, length, inside, outside)
    return _all_matrices(inside, outside)[start * inside + length - 1]


@functools.lru_cache(maxsize=2)
def _all_matrices(inside: int, outside: int) -> Floats:
    """Return the matrices of every start and every length from 1: (inside · inside, outside, inside)."""
    start, length = np.divmod(np.arange(inside * inside), inside)
    return _compute_matrices(start, length + 1, inside, outside)


def _compute_matrices(start: Boxes, length: Boxes, inside: int, outside: int) -> Floats:
    """Compute interpolation matrices (n, outside, inside).

    Weights are multiples of 2^-24, so that products with 8-bit pixels are exact in float64 in any order of summation:
    a crop does not depend on its batch or on the number of threads.
    """
    scale = (length / outside)[:, None, None]
    stretch = np.maximum(scale, 1)  # antialiasing: shrinking widens the filter
    center = start[:, None, None] + (np.arange(outside)[:, None] + 0.5) * scale
    weights = _bicubic((np.arange(inside) + 0.5 - center) / stretch)
    total = weights.sum(axis=2, keepdims=True)
    weights *= 2**24 / np.where(total > 0, total, 1)  # 0 for a crop that ends outside of the image
    np.rint(weights, out=weights)
    # Add the rounding error to the largest weight, so that a constant image stays constant.
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
