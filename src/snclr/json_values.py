"""What a JSON file of others may hold in place of what one expects."""

from __future__ import annotations

import math


def is_number(value: object) -> bool:
    """Whether a value is a finite number that fits a float: JSON's whole numbers may have thousands of digits.

    >>> is_number(3), is_number(True), is_number(10**400), is_number(float("nan"))
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
