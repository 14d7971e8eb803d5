"""Names and numbers as text for people."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"  # invisible, but part of Persian words and of composed emoji
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible(value: object, max_length: int | None = None) -> str:
    r"""Replace control, bidirectional and other invisible characters by their escape codes.

    Text longer than `max_length` loses its beginning: the end of a path is more informative.

    >>> visible("cat\u202egpj.exe"), visible("a\nb"), visible("holiday/2019/june/img.jpg", 12)
    ('cat\\u202egpj.exe', 'a\\x0ab', '…une/img.jpg')
    """
    text = str(value)
    if max_length is not None and len(text) > max_length:
        text = "…" + text[len(text) - max_length + 1 :]
    if text.isascii() and text.isprintable():
        return text
    return "".join(_show(character) for character in text)


def format_number(value: float) -> str:
    """Format with four significant digits.

    >>> format_number(12.34567), format_number(0.00012345), format_number(60000), format_number(0.5)
    ('12.35', '0.0001234', '60,000', '0.5')
    """
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}"


def _show(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode().replace("\\n", "\\x0a").replace("\\r", "\\x0d")
