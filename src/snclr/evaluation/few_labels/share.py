"""The share of the labels that is given as a percentage."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from snclr.errors import UserError

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def read_share(given: str | Path) -> Fraction | None:
    """Return the share that a percentage states, or None for another text. Raise UserError if it is no share.

    >>> read_share("0.5%"), read_share("list.txt")
    (Fraction(1, 200), None)
    """
    match = _PERCENT.fullmatch(str(given).strip())
    if match is None:
        return None
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise UserError(f"--labels {given} is not a share of the images; give more than 0% and at most 100%")
    return share
