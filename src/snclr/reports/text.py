"""Names and numbers as text for people, the metrics of a study, and the names of classes in a file."""

import json
import unicodedata
from pathlib import Path
from typing import Any

from snclr.errors import UserError, similar_path

STUDY_METRICS = {
    "knn": "kNN top-1", "linear": "linear top-1",
    "finetune1": "1 % labels top-1", "finetune10": "10 % labels top-1",
    "finetune1_top5": "1 % labels top-5", "finetune10_top5": "10 % labels top-5",
    "AP_bb": "box AP", "AP50_bb": "box AP50", "AP75_bb": "box AP75",
    "AP_mk": "mask AP", "AP50_mk": "mask AP50", "AP75_mk": "mask AP75",
}  # fmt: skip
"""Heads of the columns of a study's table."""
COMPARED = ("knn", "linear", "finetune1", "finetune10", "AP_bb", "AP_mk")
"""Those with a panel of the figure, a table of paired differences, and a number in the line of a finished run."""
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
    hidden = {c for c in set(text) - set(_JOINERS) if unicodedata.category(c) in _HIDDEN_CATEGORIES}
    codes = {c: c.encode("unicode_escape").decode().replace("\\n", "\\x0a").replace("\\r", "\\x0d") for c in hidden}
    return text.translate({ord(c): code for c, code in codes.items()})


def format_number(value: float) -> str:
    """Format with four significant digits.

    >>> format_number(12.34567), format_number(0.00012345), format_number(60000), format_number(0.5)
    ('12.35', '0.0001234', '60,000', '0.5')
    """
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}"


def read_class_names(path: str | Path) -> list[str]:
    """Read class names in the order of the class numbers: one per line, or a JSON list."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = similar_path(Path(path))
        raise UserError(f"cannot read the class names in {path}{hint} ({reason})") from error
    if not text.lstrip().startswith("["):
        names: Any = [line.strip() for line in text.rstrip().splitlines()]
    else:
        try:
            names = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not a JSON list of class names ({error})") from error
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{path} must give a name for every class: one per line, or a JSON list of texts")
    return list(names)
