"""List the images below a folder; the list of a large tree is cached.

A cached directory is listed again when its modification time or identity has changed, which happens when an entry is
added, deleted or renamed. The content of files is not checked.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from snclr.data.cache import cache_path, load_cached, save_cached
from snclr.data.decode import SUFFIXES
from snclr.errors import UserError

MIN_FILES = 10_000
"""Smaller trees are not cached."""

_VERSION = "2"
# A second change within one tick of the file system's clock is not visible, so recent times are not trusted.
_RECENT_NS = 2 * 10**9


class _Folder(NamedTuple):
    """One directory; `state` is (device, inode, modification time in ns, or -1 if it was recent)."""

    state: tuple[int, int, int]
    files: list[str]
    folders: list[str]


def list_images(top: Path) -> list[str]:
    """Return the sorted relative names of the images below a folder; links are followed, hidden names ignored."""
    cached = cache_path("folder-index", _VERSION, os.path.realpath(top))
    known = load_cached(cached, _load) or {}
    tree = _walk(top, known)
    files = sorted(prefix + name for prefix, folder in tree.items() for name in folder.files)
    if len(files) >= MIN_FILES and tree != known:
        save_cached(cached, json.dumps(tree).encode())
    return files


def _walk(top: Path, known: dict[str, _Folder]) -> dict[str, _Folder]:
    """Return the directories by relative prefix, each real directory once, from `known` if unchanged."""
    tree: dict[str, _Folder] = {}
    seen: set[tuple[int, int]] = set()
    stack = [""]
    while stack:
        prefix = stack.pop()
        path = top / prefix
        try:
            status = os.stat(path)
            state = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if state[:2] in seen:
                continue
            seen.add(state[:2])
            folder = known.get(prefix)
            if folder is None or folder.state != state:
                folder = _read(path, state)
        except (OSError, ValueError) as error:  # ValueError: a NUL character in a name of a forged cache
            raise UserError(f"the folder {path} cannot be read: {error}") from error
        tree[prefix] = folder
        stack.extend(f"{prefix}{name}/" for name in reversed(folder.folders))
    return tree


def _read(path: Path, state: tuple[int, int, int]) -> _Folder:
    if time.time_ns() - state[2] < _RECENT_NS:
        state = (*state[:2], -1)
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            linked = entry.is_symlink()  # for a link to itself, entry.is_dir() raises
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                folders.append(entry.name)
            elif entry.name.lower().endswith(SUFFIXES) and (os.path.isfile(entry.path) if linked else entry.is_file()):
                files.append(entry.name)
    return _Folder(state, sorted(files), sorted(folders))


def _load(data: bytes) -> dict[str, _Folder]:
    return {
        str(prefix): _Folder((int(device), int(inode), int(modified)), list(map(str, files)), list(map(str, folders)))
        for prefix, ((device, inode, modified), files, folders) in json.loads(data).items()
    }
