"""How people write shards: a tar, several by braces, a folder of them, a manifest, an address."""

from __future__ import annotations

import os
import re
from pathlib import Path

from snclr.data.remote import is_address
from snclr.data.shard_manifest import MANIFEST
from snclr.errors import UserError

_MAX_SHARDS = 100_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)(?:\.\.([0-9]+))?")


def names_shards(text: str) -> bool:
    """Whether what a person typed means shards: a tar, several by braces or *, a manifest, or an address.

    >>> names_shards("shards/{000..146}.tar"), names_shards("photos/"), names_shards("https://host/set/shards.json")
    (True, False, True)
    """
    if is_address(text):
        return True
    plain = text.lower()
    return plain.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")) or (
        os.path.basename(plain) == MANIFEST or (plain.endswith("}") and ".tar" in plain)
    )


def is_shard_folder(folder: Path) -> bool:
    """Whether a folder has a manifest of `snclr pack`, or tars in it and nothing else but files beside them."""
    if (folder / MANIFEST).is_file():
        return True
    seen = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                return False
            seen = seen or entry.name.lower().endswith(".tar")
            if not entry.name.lower().endswith((".tar", ".json", ".txt", ".md", ".idx", ".csv")):
                return False
    return seen


def expand_braces(text: str) -> list[str]:
    """Write out braces: a range of numbers, kept at their width, or words between commas.

    >>> expand_braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> expand_braces("{train,val}.tar")
    ['train.tar', 'val.tar']
    """
    done, todo = [], [text]
    while todo:
        current = todo.pop()
        match = _BRACES.search(current)
        if match is None:
            done.append(current)
        else:
            parts = _brace_parts(match[1], text)
            todo.extend(current[: match.start()] + part + current[match.end() :] for part in reversed(parts))
        if len(done) + len(todo) > _MAX_SHARDS:
            raise UserError(f"{text!r} names more than {_MAX_SHARDS:,} shards")
    return done


def _brace_parts(inside: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        if ".." in inside or not inside:
            raise UserError(f"{text!r}: {{{inside}}} is neither a range such as {{000..146}} nor words with commas")
        return inside.split(",")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step == 0 or abs(last - first) // step >= _MAX_SHARDS:
        raise UserError(f"{text!r} names more than {_MAX_SHARDS:,} shards")
    padded = any(len(end) > 1 and end[0] == "0" for end in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    return [
        f"{n:0{width}d}" for n in (range(first, last + 1, step) if first <= last else range(first, last - 1, -step))
    ]
