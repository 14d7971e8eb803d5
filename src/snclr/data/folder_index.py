"""The list of a folder's images; that of a large tree is kept, and checked for change before it is used again.

What is checked: every folder's own time of change and identity. A new, deleted or renamed file or folder changes those,
and that folder alone is read again. The content of a file is not looked at; it is when the image is decoded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snclr.data.cache import cache_folder, cache_name, seal, unseal
from snclr.data.decode import SUFFIXES
from snclr.data.packed import Arrays, PackedNames
from snclr.errors import UserError

MIN_FILES = 10_000
"""Smaller trees are read anew each time: that takes a moment."""

_log = logging.getLogger(__name__)
_VERSION = "1"
# A change within the same tick of the clock as our reading would leave the time as it is: such times are not trusted.
_UNSURE_NS = 2 * 10**9


class _Folder(NamedTuple):
    """A folder as it was read; `state` is (device, inode, time of change in ns), that time -1 where it is unsure."""

    state: tuple[int, int, int]
    files: list[str]
    folders: list[str]


def list_images(top: Path) -> list[str]:
    """The image files below a folder, as sorted names relative to it; links are followed, hidden names left out."""
    cached = _cached(top)
    known = _load(cached) if cached is not None else {}
    tree: dict[str, _Folder] = {}
    files = [prefix + name for prefix, folder in _walk(top, known, tree) for name in folder.files]
    if cached is not None and len(files) >= MIN_FILES and tree != known:
        seal(cached, _to_arrays(tree))
    return sorted(files)


def _walk(top: Path, known: dict[str, _Folder], tree: dict[str, _Folder]) -> Iterator[tuple[str, _Folder]]:
    """Yield every folder with its prefix, each real folder once; unchanged ones as they were known. Fills `tree`."""
    seen: set[tuple[int, int]] = set()
    stack = [""]
    while stack:
        prefix = stack.pop()
        place = top / prefix
        try:
            status = os.stat(place)
            state = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if state[:2] in seen:
                continue
            seen.add(state[:2])
            folder = known.get(prefix)
            if folder is None or folder.state != state:
                folder = _read(place, state)
        except OSError as error:
            raise UserError(f"the folder {place} cannot be read: {error.strerror}") from error
        tree[prefix] = folder
        yield prefix, folder
        stack.extend(f"{prefix}{name}/" for name in reversed(folder.folders))


def _read(place: Path, state: tuple[int, int, int]) -> _Folder:
    if time.time_ns() - state[2] < _UNSURE_NS:
        state = (*state[:2], -1)
    files, folders = [], []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            linked = entry.is_symlink()  # os.path answers False for a link to itself, where the entry would raise
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                folders.append(entry.name)
            elif entry.name.lower().endswith(SUFFIXES) and (os.path.isfile(entry.path) if linked else entry.is_file()):
                files.append(entry.name)
    return _Folder(state, sorted(files), sorted(folders))


def _cached(top: Path) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "folder-index" / f"{cache_name(_VERSION, os.path.realpath(top))}.index"


def _to_arrays(tree: dict[str, _Folder]) -> Arrays:
    prefixes = PackedNames.of(tree)
    files = PackedNames.of(name for folder in tree.values() for name in folder.files)
    folders = PackedNames.of(name for folder in tree.values() for name in folder.folders)
    return {
        "states": np.array([[n % 2**63 for n in folder.state[:2]] + [folder.state[2]] for folder in tree.values()]),
        "counts": np.array([[len(folder.files), len(folder.folders)] for folder in tree.values()]),
        **{"prefixes": prefixes.text, "prefix_ends": prefixes.ends},
        **{"files": files.text, "file_ends": files.ends},
        **{"folders": folders.text, "folder_ends": folders.ends},
    }


def _load(cached: Path) -> dict[str, _Folder]:
    arrays = unseal(cached)
    if arrays is None:
        return {}
    try:
        prefixes = PackedNames(arrays["prefixes"], arrays["prefix_ends"])
        files = iter(list(PackedNames(arrays["files"], arrays["file_ends"])))
        folders = iter(list(PackedNames(arrays["folders"], arrays["folder_ends"])))
        rows = zip(prefixes, arrays["states"].tolist(), arrays["counts"].tolist(), strict=True)
        return {
            prefix: _Folder(
                (state[0], state[1], state[2]), [next(files) for _ in range(n)], [next(folders) for _ in range(m)]
            )
            for prefix, state, (n, m) in rows
        }
    except (KeyError, ValueError, TypeError, StopIteration, RuntimeError) as error:
        _log.warning("the cache %s is damaged (%s); it is made again", cached, error)
        return {}
