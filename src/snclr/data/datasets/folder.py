"""Folders of images at any depth, and text lists of image files.

The file list of a large tree is cached. A cached directory is listed again when its modification time or identity has
changed, which happens when an entry is added, deleted or renamed. The content of files is not checked.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from snclr.data.cache import cache_path, load_cached, save_cached
from snclr.data.datasets.base import FileDataset, ImageDataset
from snclr.data.decode import SUFFIXES
from snclr.data.labels import encode_labels, number_labels
from snclr.errors import UserError, count

# Subfolders of each split in a folder with train/ and val/ or test/.
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "test"), "test": ("test", "val")}

_OTHER_PHOTOS = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".psd", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2",
)  # fmt: skip
"""Suffixes of photographs that are not read."""

HOW_TO_LABEL = (
    "put the images of each class in its own subfolder (one class alone is not enough), or give a list file with "
    "a label after each path (separated by a tab)"
)

MIN_FILES = 10_000
"""Smaller trees are not cached."""

_VERSION = "2"  # part of the cache key; increase it when the cached values change
# A second change within one tick of the file system's clock is not visible, so recent times are not trusted.
_RECENT_NS = 2 * 10**9


def open_folder(folder: Path, *, name: str, split: str = "train") -> FileDataset:
    """Open all images below a folder, sorted by name; first-level subfolders are the classes if there are several.

    In a folder with `train/` and `val/` or `test/`, `split` selects one of them, and `all` ignores the splits. Other
    folders have no splits, and every `split` gives all of it.
    """
    chosen = split_folder(folder, split)
    files = list_images(chosen)
    if not files:
        raise UserError(
            f"no images found in {chosen}. {other_photos(chosen)}Files with the suffixes {' '.join(SUFFIXES)} are found"
            " at any depth; hidden ones are ignored."
        )
    tops = [file.partition("/")[0] if "/" in file else None for file in files]
    names = {top for top in tops if top is not None}
    if chosen != folder:
        # All splits number the classes alike, even if one lacks a class.
        names |= {path.name for path in (folder / "train").iterdir() if path.is_dir() and path.name[0] != "."}
    if len(names) < 2:
        return FileDataset(name, chosen, files)
    classes = sorted(names)
    return FileDataset(name, chosen, files, encode_labels(tops, classes), classes)


def open_list(path: Path, *, name: str) -> FileDataset:
    """Open the images listed in a text file: one path per line, with an optional TAB and label; `#` starts a comment.

    Paths are relative to the folder of the list. Missing files are an error.
    """
    if path.suffix.lower() in SUFFIXES:
        raise UserError(f"{name} is a single image; give a folder of images or a text list of them")
    files: list[str] = []
    names: list[str | None] = []
    for number, line in read_list_file(path, name):
        file, *label = (part.strip() for part in line.split("\t"))
        if len(label) > 1 or not file:
            raise UserError(f"{name}, line {number}: expected a path, or a path, one TAB and a label; got {line!r}")
        files.append(file)
        names.append((label[0] or None) if label else None)
    if not files:
        raise UserError(f"{name} lists no images; each line is a path, or a path, a TAB and a label")
    missing = [file for file in files if not os.path.isfile(path.parent / file)]
    if missing:
        raise UserError(
            f"{name} lists {count(len(missing), 'missing file')}, e.g. {', '.join(missing[:3])}. Paths are relative "
            "to the folder of the list, and a label is separated by a TAB."
        )
    labels, classes = number_labels(names)
    return FileDataset(name, path.parent, files, labels, classes)


def read_list_file(path: Path, name: str) -> list[tuple[int, str]]:
    """Return number and text of the lines of a list that are neither empty nor a comment."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{name} cannot be read as a text list of image paths: {error}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]


def split_folder(folder: Path, split: str) -> Path:
    """Return the subfolder of a split if there are train/ and val/ or test/; else the folder itself."""
    if split == "all":
        return folder
    if split not in _SPLIT_FOLDERS:
        raise UserError(f"unknown split {split!r}; a folder has train, val, test or all")
    if (folder / "train").is_dir() and ((folder / "val").is_dir() or (folder / "test").is_dir()):
        return next(folder / sub for sub in _SPLIT_FOLDERS[split] if (folder / sub).is_dir())
    return folder


def nested_classes(dataset: ImageDataset) -> str:
    """Return " (did you mean 'photos/test'?)" for a folder whose class folders are all below one subfolder, or ""."""
    if not isinstance(dataset, FileDataset) or not Path(dataset.name).expanduser().is_dir():
        return ""
    folders = [os.path.dirname(file) for file in dataset.files if "/" in file]
    common = os.path.commonpath(folders) if folders else ""
    classes = {folder[len(common) + 1 :].partition("/")[0] for folder in folders if folder != common}
    return f" (did you mean {str(dataset.folder / common)!r}?)" if common and len(classes) > 1 else ""


def require_labels(dataset: ImageDataset, part: str) -> None:
    """Raise UserError if no image of a dataset, the training or test part of an evaluation, has a label."""
    if dataset.labels is None or not bool((dataset.labels >= 0).any()):
        hint = nested_classes(dataset)
        raise UserError(f"the {part} images ({dataset.name}) have no labels{hint}. To label them, {HOW_TO_LABEL}")


def other_photos(folder: Path) -> str:
    """Return a sentence that counts the photographs of formats that are not read, with a space after it, or ""."""
    names = (name.lower() for _, _, files in os.walk(folder) for name in files if not name.startswith("."))
    found = Counter(os.path.splitext(name)[1] for name in names if name.endswith(_OTHER_PHOTOS))
    kinds = " and ".join(count(number, f"{suffix} file") for suffix, number in sorted(found.items()))
    return f"Not read: {kinds}; convert to JPEG or PNG. " if kinds else ""


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
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"the folder {path} cannot be read ({reason}). Give a folder that you may read.") from error
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
