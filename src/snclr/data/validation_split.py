"""Names of the two parts of a training split: DATA#validation (a tenth of each class) and DATA#fit (the others)."""

from pathlib import Path

VALIDATION_SHARE = 0.1
"""Share of each training class in the validation part of a dataset."""
FIT, VALIDATION = "#fit", "#validation"
"""Endings of `--data` that name a part of the training split."""


def split_part(data: str) -> tuple[str, str]:
    """Split the name of a part into dataset and part; the part is empty for a whole dataset or an existing path.

    >>> split_part("demo#fit"), split_part("demo")
    (('demo', '#fit'), ('demo', ''))
    """
    for part in (FIT, VALIDATION):
        if data.endswith(part) and not Path(data).expanduser().exists():
            return data.removesuffix(part), part
    return data, ""
