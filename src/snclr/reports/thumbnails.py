"""Images as data URIs: decoded and encoded again, so that no metadata of the original file is kept."""

import base64
import io

import numpy as np
import torch
from PIL import Image
from torchvision.utils import make_grid

from snclr.data.decode import RGBImage

_JPEG_QUALITY = 82


def thumbnail_uri(image: RGBImage, side: int) -> str:
    """Return the center square, scaled down to at most `side` pixels, as a data URI."""
    square = center_square(image)
    if len(square) > side:
        return _data_uri(square_tile(image, side), "JPEG")
    return _data_uri(square, "PNG")


def sprite_uri(tiles: RGBImage, columns: int) -> str:
    """Return tiles (N, S, S, 3) on a grid, row by row, as one data URI."""
    sprite = make_grid(torch.from_numpy(tiles).permute(0, 3, 1, 2), nrow=columns, padding=0)
    return _data_uri(sprite.permute(1, 2, 0).numpy(), "JPEG")


def square_tile(image: RGBImage, side: int) -> RGBImage:
    """Return the center square, resized to (side, side, 3)."""
    return np.asarray(Image.fromarray(center_square(image)).resize((side, side), Image.Resampling.LANCZOS))


def center_square(image: RGBImage) -> RGBImage:
    """Return the largest center square (S, S, 3) of an image (H, W, 3)."""
    height, width, _ = image.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    return np.ascontiguousarray(image[top : top + short, left : left + short])


def _data_uri(image: RGBImage, kind: str) -> str:
    buffer = io.BytesIO()
    options = {"quality": _JPEG_QUALITY} if kind == "JPEG" else {"optimize": True}
    Image.fromarray(image).save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
