"""Checkpoints: tensors in safetensors, plain values in JSON, and a manifest with their hashes. Loading runs no code.

    checkpoints/step-0000000120/{tensors.safetensors, info.json, manifest.json}

A checkpoint is written to a hidden folder, synced to disk and renamed, so a folder `step-*` is always complete. To
replace a step, the new folder is first renamed to `step-*.new`, which counts as a checkpoint too, so a
complete one always exists. Writers hold a lock, and its holder removes what killed writers left behind.
"""

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from snclr.errors import UserError
from snclr.io.atomic import discard, explain_full_disk, fsync_path, is_partial, partial_path, remove_partial, write_all
from snclr.io.hashing import sha256_file, sha256_text
from snclr.io.locking import FileLock

SCHEMA = 1
TENSORS, INFO, MANIFEST = "tensors.safetensors", "info.json", "manifest.json"

_NAME = re.compile(r"step-\d{10}(\.new)?")
_LOCK_TIMEOUT = 60.0
_MAX_MANIFEST_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are missing or differ from what was written."""


class UnknownSchema(UserError):
    """An intact checkpoint of a newer version of snclr."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, with tensors on the CPU. Tuples in `info` are lists after the round trip to JSON."""

    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path | str, tensors: dict[str, Tensor], info: dict[str, Any], *, step: int, keep: int = 3
) -> Path:
    """Write `folder`/step-<step> atomically, then delete all but the newest `keep` checkpoints up to that step.

    Tensors may be on any device, share memory or be non-contiguous. If it fails, earlier checkpoints are unchanged.

    >>> import tempfile, torch
    >>> saved = save_checkpoint(tempfile.mkdtemp(), {"w": torch.ones(2)}, {"epoch": 3}, step=120)
    >>> saved.name, load_checkpoint(saved).info
    ('step-0000000120', {'epoch': 3})
    """
    folder = Path(folder)
    target = folder / f"step-{step:010d}"
    info_json = json.dumps(info, indent=1).encode()
    with explain_full_disk(target, sum(t.nbytes for t in tensors.values()) + len(info_json) + 1000):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_path(folder.parent)
        lock = FileLock(folder / ".lock")
        if not lock.acquire(_LOCK_TIMEOUT):
            raise UserError(
                f"{lock.holder()} has been writing to {folder} for {_LOCK_TIMEOUT:.0f} s. Stop it and resume."
            )
        partial = partial_path(target)
        try:
            _recover(folder)
            partial.mkdir()
            _write_synced(partial / INFO, info_json)
            _write_tensors(partial / TENSORS, tensors)
            (partial / TENSORS).chmod((partial / INFO).stat().st_mode)  # safetensors creates files with mode 0600
            files = {
                name: {"sha256": sha256_file(partial / name), "size": (partial / name).stat().st_size}
                for name in (TENSORS, INFO)
            }
            _write_synced(partial / MANIFEST, _manifest_bytes({"schema": SCHEMA, "step": step, "files": files}))
            fsync_path(partial)
            os.rename(partial, target.with_name(target.name + ".new") if target.exists() else target)
            fsync_path(folder)
            _recover(folder)
            _prune(folder, step, keep)
        finally:
            with contextlib.suppress(OSError):
                remove_partial(partial)
            lock.release()
    return target


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read one checkpoint after checking its schema, sizes and hashes; raise DamagedCheckpoint or UnknownSchema."""
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_dir():
        raise DamagedCheckpoint(f"there is no checkpoint at {path}")
    try:
        manifest = _read_manifest(path)
        for name, entry in manifest["files"].items():
            if entry["size"] != (size := _file_size(path / name)):
                raise ValueError(f"{name} has {size} bytes, but {entry['size']} were written")
            if entry["sha256"] != sha256_file(path / name):
                raise ValueError(f"the sha256 of {name} differs from the one in {MANIFEST}")
        info = json.loads((path / INFO).read_bytes())
        if not isinstance(info, dict):
            raise ValueError(f"{INFO} is not a JSON object")
        # load_file maps the file into memory; clone, so that a later change of the file cannot change the tensors.
        tensors = {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}
    except UnknownSchema:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged and is not used: {error}") from error
    return Checkpoint(step=manifest["step"], tensors=tensors, info=info, path=path)


def latest_checkpoint(folder: Path | str, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None; call `warn` for each damaged one that is skipped.

    Raise UnknownSchema for a checkpoint of a newer version: to skip it would silently discard training steps.
    """
    folder = Path(folder)
    damaged: set[Path] = set()
    while remaining := {path: inode for path, inode in _checkpoints(folder).items() if path not in damaged}:
        path, inode = next(iter(remaining.items()))
        try:
            return load_checkpoint(path)
        except DamagedCheckpoint as error:
            if _checkpoints(folder).get(path) == inode:  # else a running writer has replaced or deleted it
                damaged.add(path)
                warn(str(error))
    if damaged:
        warn(f"no checkpoint in {folder} is intact ({len(damaged)} damaged); there is nothing to resume from")
    return None


def saved_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder, intact or damaged, by step."""
    return {int(path.name[5:15]): path for path in _checkpoints(folder)}


def _write_synced(path: Path, data: bytes) -> None:
    """Create a file and sync it to disk."""
    with open(path, "xb") as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a synced safetensors file; equal tensors give equal bytes."""
    import safetensors.torch

    # safetensors refuses tensors that share memory, so each is copied.
    prepared = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(prepared, path)
    except SafetensorError as error:  # raised for errors of the disk too
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise
    fsync_path(path)


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    """Add a hash of the manifest itself: a flipped bit in its step or schema must be recognized as damage."""
    return json.dumps({**body, "manifest_sha256": _digest(body)}, indent=1).encode() + b"\n"


def _digest(manifest: dict[str, Any]) -> str:
    return sha256_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise ValueError and the like for any damage."""
    if _file_size(path / MANIFEST) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} is too large")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    digest = manifest.pop("manifest_sha256", None)
    if _digest(manifest) != digest or type(manifest["schema"]) is not int:
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if manifest["schema"] != SCHEMA:
        raise UnknownSchema(
            f"the checkpoint {path} has schema {manifest['schema']}, but this version of snclr reads {SCHEMA}."
            " Use the version that wrote it, or move it away to continue from an earlier checkpoint."
        )
    if type(manifest["step"]) is not int or set(manifest["files"]) != {TENSORS, INFO}:
        raise ValueError(f"{MANIFEST} does not list {TENSORS} and {INFO}")
    return manifest


def _file_size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise ValueError(f"{path.name} is not a regular file")
    return status.st_size


def _checkpoints(folder: Path) -> dict[Path, int]:
    """Return the inodes of the checkpoints, newest first; the replacement of a step comes before the step."""
    entries = [entry for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)] if folder.is_dir() else []
    return {folder / entry.name: entry.inode() for entry in sorted(entries, key=lambda e: e.name, reverse=True)}


def _prune(folder: Path, step: int, keep: int) -> None:
    # Later steps are not counted: they may be damaged and are written again when the run reaches them.
    for path in [path for path in _checkpoints(folder) if int(path.name[5:15]) <= step][keep:]:
        try:
            discard(path)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _recover(folder: Path) -> None:
    """Remove unfinished writes and finish replacements, also those of a killed writer. The caller holds the lock."""
    for path in list(folder.iterdir()):
        if is_partial(path):
            remove_partial(path)
        elif _NAME.fullmatch(path.name) and path.suffix == ".new":
            target = path.with_suffix("")
            if target.exists():
                discard(target)
            os.rename(path, target)
            fsync_path(folder)
