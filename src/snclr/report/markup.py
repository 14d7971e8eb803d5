"""Text of others made safe for a page: names of files, classes and runs are shown, never obeyed."""

from __future__ import annotations

import base64
import io
import json
import math
import unicodedata
from typing import Any

import numpy as np
from PIL import Image

from snclr.data.decode import Picture

_JOINERS = "\u200c\u200d"  # invisible, but part of Persian words and of composed emoji
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_QUALITY = 82


def visible(value: object, most: int = 200) -> str:
    r"""The text with every character that hides, breaks lines or turns the reading direction shown as its code.

    Text of more than `most` characters loses its beginning: the end of a path says more.

    >>> visible("cat\u202egpj.exe"), visible("a\nb"), visible("holiday/2019/june/img.jpg", 12)
    ('cat\\u202egpj.exe', 'a\\x0ab', '…une/img.jpg')
    """
    text = value if isinstance(value, str) else str(value)
    if len(text) > most:
        text = "…" + text[len(text) - most + 1 :]
    return "".join(_show(character) for character in text)


def escape(value: object, most: int = 200) -> str:
    """`visible` text for an element or a quoted attribute of HTML or SVG.

    >>> escape('<b onclick="x">')
    '&lt;b onclick=&quot;x&quot;&gt;'
    """
    return "".join(_ENTITIES.get(character, character) for character in visible(value, most))


def name(value: object, most: int = 200) -> str:
    """A name as an element of its own, so that one in Arabic does not reorder the words around it."""
    return f"<bdi>{escape(value, most)}</bdi>"


def data_block(key: str, value: Any) -> str:
    r"""JSON for the page's script: plain ASCII, in which nothing can end the element or open a comment.

    >>> data_block("d", {"a": "</script><!--"})
    '<script type="application/json" id="d">{"a":"\\u003c/script\\u003e\\u003c!--"}</script>'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":  # outside strings JSON has none of these
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(key)}">{text}</script>'


def figure(value: float) -> str:
    """A number for people: four digits that count.

    >>> figure(12.34567), figure(0.00012345), figure(60000), figure(0.5)
    ('12.35', '0.0001234', '60,000', '0.5')
    """
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def picture_uri(picture: Picture, side: int) -> str:
    """The middle square of a picture, at most `side` wide, as a data address; nothing but pixels is kept of it."""
    square = middle_square(picture)
    image = Image.fromarray(square)
    if len(square) > side:
        return _uri(image.resize((side, side), Image.Resampling.LANCZOS), "JPEG")
    return _uri(image, "PNG")


def sheet_uri(tiles: Picture, columns: int) -> str:
    """Tiles (n, s, s, 3) side by side on one sheet, as a data address."""
    count, side = len(tiles), tiles.shape[1]
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, side, side, 3), np.uint8)
    sheet[:count] = tiles
    laid = sheet.reshape(rows, columns, side, side, 3).swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    return _uri(Image.fromarray(laid), "JPEG")


def tile(picture: Picture, side: int) -> Picture:
    """The middle square of a picture as (side, side, 3)."""
    image = Image.fromarray(middle_square(picture))
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def middle_square(picture: Picture) -> Picture:
    """The largest square in the middle (S, S, 3) of a picture (H, W, 3)."""
    height, width, _ = picture.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    return np.ascontiguousarray(picture[top : top + short, left : left + short])


def _show(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode().replace("\\n", "\\x0a").replace("\\r", "\\x0d")


def _uri(image: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": _QUALITY} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
