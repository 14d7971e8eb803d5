"""Class names of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from snclr.errors import UserError, similar_path


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
