"""Checkpoints: safetensors + JSON + a hash manifest, whole or absent. Opening one never runs code.

    checkpoints/step-0000000120/{tensors.safetensors, info.json, manifest.json}

A folder is written under a hidden name, synced to disk and renamed, so a name `step-…` is complete from the moment it
exists. Saving a step that exists goes through `step-….new`, which counts as a checkpoint too: at no instant is there
none. Only the holder of the folder's lock removes hidden leftovers, so the work of a living writer is never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from snclr.durable import (
    FileLock,
    discard,
    explain_full_disk,
    fsync_folder,
    is_partial,
    partial_path,
    remove_partial,
)
from snclr.errors import UserError
from snclr.train.tensor_file import safetensors_header, safetensors_pieces, write_hashed

SCHEMA = 1
TENSORS, INFO, MANIFEST = "tensors.safetensors", "info.json", "manifest.json"

_NAME = re.compile(r"step-(\d{10})(\.new)?")
_CHUNK = 8 << 20
_SAVE_WAIT_SECONDS = 60.0
_log = logging.getLogger(__name__)


class DamagedCheckpoint(UserError):
    """A checkpoint whose bytes are not those that were written."""


class UnknownSchema(UserError):
    """A checkpoint of another (newer) version of this program: intact, but not to be guessed at."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: tensors on the CPU, `info` as JSON gave it back (tuples have become lists)."""

    step: int
    tensors: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path | str, tensors: dict[str, Tensor], info: dict[str, Any], *, step: int, keep: int = 3
) -> Path:
    """Write `folder`/step-<step> in one step, then prune all but the newest `keep` up to that step.

    Tensors may be on any device, shared, or non-contiguous. A crash or a full disk leaves earlier ones as they were.

    >>> import tempfile, torch
    >>> saved = save_checkpoint(tempfile.mkdtemp(), {"w": torch.ones(2)}, {"epoch": 3}, step=120)
    >>> saved.name, load_checkpoint(saved).info
    ('step-0000000120', {'epoch': 3})
    """
    if keep < 1:
        raise UserError(f"keep={keep} checkpoints was asked for; at least 1 must be kept")
    assert 0 <= step < 10**10, step
    folder = Path(folder)
    info_json = json.dumps(info, indent=1).encode()  # before anything touches the disk: it may refuse
    header, order = safetensors_header(tensors)
    needed = len(header) + sum(t.nbytes for t in tensors.values()) + len(info_json) + 1000
    target = folder / f"step-{step:010d}"
    with explain_full_disk(target, needed):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(folder.parent)
        with _sole_writer(folder):
            partial = partial_path(target)
            try:
                partial.mkdir()
                files = {
                    TENSORS: write_hashed(partial / TENSORS, safetensors_pieces(header, order, tensors)),
                    INFO: write_hashed(partial / INFO, [info_json]),
                }
                write_hashed(partial / MANIFEST, [_manifest_bytes({"schema": SCHEMA, "step": step, "files": files})])
                fsync_folder(partial)
                _publish(partial, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_partial(partial)
                raise
            _prune(folder, step, keep)
    return target


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read one checkpoint folder, its schema, sizes and hashes checked first; DamagedCheckpoint, UnknownSchema."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no checkpoint folder {path}")
    manifest = _read_manifest(path)
    files = manifest["files"]
    _verified(path, TENSORS, files)
    info_json = _verified(path, INFO, files, read=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        info = json.loads(info_json)
        # Cloned, because load_file maps the file: a later change of the file would change (or end) the process.
        tensors = {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(path, f"its content cannot be read ({error})") from error
    if not isinstance(info, dict):
        raise _damaged(path, f"{INFO} does not hold an object")
    return Checkpoint(step=manifest["step"], tensors=tensors, info=info, path=path)


def latest_checkpoint(folder: Path | str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint, or None; `warn` is told of each damaged one passed over, and why.

    A checkpoint of an unknown schema raises UnknownSchema: going back behind it would throw work away unasked.
    """
    folder = Path(folder)
    _recover_if_idle(folder)
    rejected: set[Path] = set()
    while remaining := [path for path in _checkpoints(folder) if path not in rejected]:
        path = remaining[0]
        identity = _identity(path)
        try:
            return load_checkpoint(path)
        except UnknownSchema:
            raise
        except UserError as error:
            if identity is None or _identity(path) != identity:
                continue  # replaced or pruned by a living writer while it was read: look again
            rejected.add(path)
            warn(str(error))
    if rejected:
        warn(f"none of the {len(rejected)} checkpoints in {folder} is intact: there is nothing to resume from")
    return None


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "manifest_sha256": _manifest_digest(body)}, indent=1).encode() + b"\n"


def _manifest_digest(body: dict[str, Any]) -> str:
    """Of the manifest itself: a flipped bit in its step or schema must be damage, not another step or schema."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _regular_file(path, MANIFEST, max_size=1 << 16)
    try:
        manifest = json.loads(data)
        body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
        intact = _manifest_digest(body) == manifest["manifest_sha256"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error})") from error
    if not intact or type(body.get("schema")) is not int:
        raise _damaged(path, f"{MANIFEST} was changed after it was written")
    if body["schema"] != SCHEMA:
        raise UnknownSchema(
            f"the checkpoint {path} has schema {body['schema']}; this version of snclr reads schema {SCHEMA}."
            " Use the version that wrote it (or a newer one), or move it away to go on from an earlier checkpoint."
        )
    step, files = body.get("step"), body.get("files")
    listed = (
        isinstance(files, dict) and set(files) == {TENSORS, INFO} and all(isinstance(f, dict) for f in files.values())
    )
    if type(step) is not int or not listed:
        raise _damaged(path, f"{MANIFEST} does not list {TENSORS} and {INFO}")
    return body


def _regular_file(path: Path, name: str, max_size: int | None = None) -> bytes:
    """The bytes of a plain file; a pipe or device of that name must not be able to hang the reader."""
    _check_regular(path, name, max_size)
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read ({error.strerror})") from error


def _check_regular(path: Path, name: str, max_size: int | None = None) -> int:
    try:
        status = (path / name).stat()
    except OSError as error:
        raise _damaged(path, f"{name} is missing ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or (max_size is not None and status.st_size > max_size):
        raise _damaged(path, f"{name} is not a file of the expected kind and size")
    return status.st_size


def _verified(path: Path, name: str, files: dict[str, Any], *, read: bool = False) -> bytes:
    """Check size and hash of one file; its bytes where `read` (the tensors are not held twice)."""
    size = _check_regular(path, name)
    expected = files[name].get("size")
    if size != expected:
        raise _damaged(path, f"{name} has {size} bytes where {expected} were written")
    digest = hashlib.sha256()
    content = bytearray()
    try:
        with open(path / name, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                if read:
                    content += chunk
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read ({error.strerror})") from error
    if digest.hexdigest() != files[name].get("sha256"):
        raise _damaged(path, f"the bytes of {name} are not those that were written (sha256 differs)")
    return bytes(content)


def _damaged(path: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"the checkpoint {path} is damaged and will not be used: {why}")


def _checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, newest first; of one step, the replacement first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda f: (int(f[0][1]), f[0][2] is not None), reverse=True)]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _publish(partial: Path, target: Path) -> None:
    if target.exists():
        replacement = target.with_name(target.name + ".new")
        os.rename(partial, replacement)
        fsync_folder(target.parent)
        _settle(replacement)
    else:
        os.rename(partial, target)
        fsync_folder(target.parent)


def _settle(replacement: Path) -> None:
    """Put `step-….new` in the place of `step-…`."""
    target = replacement.with_name(replacement.name.removesuffix(".new"))
    if target.exists():
        discard(target)
    os.rename(replacement, target)
    fsync_folder(target.parent)


def _prune(folder: Path, step: int, keep: int) -> None:
    # Only steps up to the one just written are counted: one of a later step is not ours to judge here (it may be the
    # newest intact one, or a damaged one that the run will write again when it gets there).
    upto = [path for path in _checkpoints(folder) if int(path.name[5:15]) <= step]
    for path in upto[keep:]:
        _discard_or_log(path)


def _discard_or_log(path: Path) -> None:
    try:
        discard(path)
    except OSError as error:  # the new checkpoint is safe, so the run goes on
        _log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _leftovers(folder: Path) -> list[Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return [p for p in entries if p.name.endswith(".new") or is_partial(p)]


def _recover(folder: Path) -> None:
    """Finish or undo what a dead writer left; the caller holds the lock."""
    for path in _leftovers(folder):
        if not path.name.endswith(".new"):
            remove_partial(path)
        elif _NAME.fullmatch(path.name):
            _settle(path)


@contextlib.contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    if not lock.acquire(_SAVE_WAIT_SECONDS):
        raise UserError(f"another process has been saving into {folder} for {_SAVE_WAIT_SECONDS:.0f} s; stop it first")
    try:
        _recover(folder)
        yield
    finally:
        lock.release()


def _recover_if_idle(folder: Path) -> None:
    """Recover unless a living writer is at work, or we may not write here (a reader of someone else's run)."""
    if not _leftovers(folder):
        return
    lock = FileLock(folder / ".lock")
    with contextlib.suppress(OSError):
        if lock.acquire() and lock.held:
            _recover(folder)
    lock.release()
