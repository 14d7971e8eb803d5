"""List files: image paths, each below a comment line with its reason; read by `--data` and `finetune --labels`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snclr.data.datasets.base import ImageDataset


@dataclass(frozen=True)
class Entry:
    """An image by its index in the dataset, and why it is listed (may be empty)."""

    index: int
    reason: str


def format_list(dataset: ImageDataset, entries: Sequence[Entry], header: Iterable[str]) -> str:
    """Return the text of a list file.

    Files are written with their absolute path. An image without a file of its own is written by its key, which only
    `finetune --labels` reads. A name that no list can hold (line breaks, TAB, bytes that are not UTF-8) is a comment.
    """
    lines = [f"# {_one_line(text)}" for text in header]
    if any(dataset.file(entry.index) is None for entry in entries):
        lines.append("# These images have no files of their own: use the list with snclr finetune --labels.")
    for entry in entries:
        if entry.reason:
            lines.append(f"# {_one_line(entry.reason)}")
        name = _name(dataset, entry.index)
        lines.append(name or f"# not listed, its name does not fit on a line: {_one_line(dataset.key(entry.index))}")
    return "\n".join(lines) + "\n"


def _name(dataset: ImageDataset, index: int) -> str | None:
    """Return the line of an image, or None if its name cannot be written as one."""
    file = dataset.file(index)
    name = dataset.key(index) if file is None else str(file.absolute())
    one_line = name == name.strip() and "\t" not in name and len(name.splitlines()) == 1
    is_utf8 = name == name.encode(errors="replace").decode()
    return name if one_line and is_utf8 and not name.startswith("#") else None


def _one_line(text: str) -> str:
    """Escape everything that would end a comment line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
