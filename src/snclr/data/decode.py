"""Decode untrusted image files to RGB arrays; every failure is a BadImage.

Only formats with a plain decoder are opened (never EPS, which starts another program), and the size is checked before
decoding.
"""

import contextlib
import os
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

RGBImage = npt.NDArray[np.uint8]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (
    *(".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
MAX_PIXELS = 100_000_000  # 300 MB as RGB: above any camera, below the memory of a worker


class BadImage(Exception):
    """A file that is not a usable image; the message is the reason, in one line."""


def load_or_none(load: Callable[..., RGBImage], *arguments: Any) -> RGBImage | None:
    """Call a function that loads an image; return None if the image cannot be read."""
    try:
        return load(*arguments)
    except BadImage:
        return None


def decode(path: str | Path, min_side: int | None = None) -> RGBImage:
    """Decode a file to uint8 (H, W, 3) RGB: EXIF-rotated, the first frame, transparency on white.

    With `min_side`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, with a short side of at least `min_side`.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadImage("not a regular file")
        with open(path, "rb") as file:
            return decode_stream(file, min_side)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror or error}") from error


def decode_stream(file: BinaryIO, min_side: int | None = None) -> RGBImage:
    """Decode an open, seekable binary file like `decode`."""
    if not file.read(1):
        raise BadImage("empty file")
    file.seek(0)
    try:
        with _QUIET, Image.open(file, formats=FORMATS) as image:
            return _to_rgb(image, min_side)
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(f"not an image of a known format ({', '.join(FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise BadImage("far too many pixels") from error
    except Exception as error:
        # Pillow's decoders raise many types on damaged data: OSError, SyntaxError, ValueError, struct.error …
        reason = str(error).split(" <", 1)[0].partition("\n")[0][:200]  # without the memory addresses of `repr`
        raise BadImage(f"damaged: {type(error).__name__}: {reason}") from error


def _to_rgb(image: Image.Image, min_side: int | None) -> RGBImage:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width}×{height} is more than {MAX_PIXELS} pixels")
    if width < 1 or height < 1:
        raise BadImage(f"no pixels ({width}×{height})")
    if min_side is not None:
        image.draft(None, (min_side, min_side))  # has an effect on JPEG only
    image.load()
    with contextlib.suppress(Exception):  # the pixels may be valid despite damaged metadata
        ImageOps.exif_transpose(image, in_place=True)  # after load(), which rotates TIFF and drops the tag
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_eight_bits(image))
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.new("RGBA", rgba.size, "white")
        image.alpha_composite(rgba)
    return np.array(image.convert("RGB"))


def _eight_bits(image: Image.Image) -> RGBImage:
    """Convert a gray image to 8 bits: 16-bit values by the full range, 32-bit and float values by their own range."""
    values: npt.NDArray[Any] = np.asarray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format != "TIFF"):
        # Some versions of Pillow open 16-bit PNG and PGM with mode "I"; only TIFF has 32-bit values.
        return ((values.clip(0, 65535).astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadImage("has pixels that are not finite numbers")
    return np.rint((values.astype(np.float64) - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)


class _Quiet:
    """Ignore warnings while any thread decodes: Pillow warns of harmless defects in many files.

    `warnings.catch_warnings` alone is not thread-safe: overlapping blocks may leave the filters changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._catcher = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._catcher = warnings.catch_warnings()
                self._catcher.__enter__()
                warnings.simplefilter("ignore")
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._catcher.__exit__(None, None, None)


_QUIET = _Quiet()
