"""Write a folder of images as shards that WebDataset reads too: the files' own bytes, a manifest and hashes.

The same folder gives the same shards, byte for byte. A pack that was stopped goes on where it was: until all are
complete and get their name in one step, shards lie in a hidden folder beside the target, with notes of what is in each.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from snclr.data.decode import BadImage, decode_stream
from snclr.data.order import Ids, epoch_order
from snclr.data.packed import PackedNames
from snclr.data.shard_index import ShardIndex
from snclr.data.shard_manifest import MANIFEST, Manifest, ShardEntry, read_manifest, write_manifest
from snclr.data.sources import FileSource
from snclr.durable import (
    FileLock,
    explain_full_disk,
    lock_folder,
    partial_path,
    remove_partial,
    sweep,
    write_atomic,
)
from snclr.errors import UserError

_BLOCK = 512
_RECORD = 20 * _BLOCK  # tars end on a multiple of this, by custom
_SHARDS = "shards"  # in the hidden folder: what gets the target's name in the end


@dataclass(frozen=True)
class Example:
    """One image on its way into a shard: its `number` in the set, its bytes, key (without ending), ending and label."""

    number: int
    data: bytes
    key: str
    ending: str
    label: int
    file: str


@dataclass
class ShardNote:
    """What is in a finished shard: for each image its number, place and size; and the images left out, with reasons."""

    name: str
    bytes: int
    sha256: str
    rows: list[tuple[int, int, int]]
    bad: list[tuple[int, str]]

    @property
    def entry(self) -> ShardEntry:
        """Its line of the manifest."""
        return ShardEntry(self.name, self.bytes, self.sha256, len(self.rows))


def plan_shards(sizes: Sequence[int], order: Ids, shard_bytes: int, images_per_shard: int | None) -> list[Ids]:
    """Cut the images, in `order` (n,), into shards of about `shard_bytes`, or of so many images.

    >>> [part.tolist() for part in plan_shards([400, 400, 400], np.arange(3), 2000, None)]
    [[0], [1], [2]]
    """
    parts: list[list[int]] = [[]]
    filled = 0
    for number in order.tolist():
        # The image with its header and padding, and two blocks for the label.
        needed = _BLOCK + -(-sizes[number] // _BLOCK) * _BLOCK + 2 * _BLOCK
        full = len(parts[-1]) >= images_per_shard if images_per_shard else filled + needed > shard_bytes
        if parts[-1] and full:
            parts.append([])
            filled = 0
        parts[-1].append(number)
        filled += needed
    return [np.array(part, dtype=np.int64) for part in parts]


def write_shard(path: Path, examples: Iterator[Example]) -> ShardNote:
    """Write one tar, whole or not at all, and say what is in it."""
    partial = path.with_name(path.name + ".partial")
    digest, position = hashlib.sha256(), 0
    rows: list[tuple[int, int, int]] = []
    with explain_full_disk(path, 0), open(partial, "wb") as file:

        def put(data: bytes) -> None:
            nonlocal position
            file.write(data)
            digest.update(data)
            position += len(data)

        def member(name: str, data: bytes) -> int:
            put(_header(name, len(data)))
            start = position
            put(data + bytes(-len(data) % _BLOCK))
            return start

        for example in examples:
            rows.append((example.number, member(f"{example.key}.{example.ending}", example.data), len(example.data)))
            if example.label >= 0:
                member(f"{example.key}.cls", b"%d" % example.label)
            if example.key + PurePosixPath(example.file).suffix != example.file:
                member(f"{example.key}.json", json.dumps({"file": example.file}).encode())
        put(bytes(2 * _BLOCK))
        put(bytes(-position % _RECORD))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return ShardNote(path.name, position, digest.hexdigest(), rows, [])


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644  # no time and no owner: the same images give the same bytes
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def member_keys(files: Sequence[str]) -> list[str]:
    """A key for each file as WebDataset understands keys: unique, and without a dot in its last part.

    >>> member_keys(["a/x.jpg", "a/x.png", "a/y.1.jpg"])
    ['a/x', 'a/x-2', 'a/y_1']
    """
    used: set[str] = set()
    keys = []
    for file in files:
        path = PurePosixPath(file)
        plain = str(path.with_name(path.stem.replace(".", "_") or "_"))
        key, count = plain, 1
        while key in used:
            count += 1
            key = f"{plain}-{count}"
        used.add(key)
        keys.append(key)
    return keys


@dataclass(frozen=True)
class PackSettings:
    """All that decides what the shards of some images are. `seed` spreads the images over them (None: in their order).

    With `check` each image is decoded, and left out where that fails.
    """

    shard_bytes: int
    images_per_shard: int | None = None
    seed: int | None = 0
    check: bool = False


@dataclass(frozen=True)
class Packed:
    """What was written of one source: the manifest, and the images left out, as keys and reasons."""

    manifest: Manifest
    bad: list[tuple[str, str]]


def pack_files(
    parts: Mapping[str, FileSource],
    out: Path,
    settings: PackSettings,
    *,
    workers: int = 1,
    done: Callable[[int], None] = lambda images: None,
) -> dict[str, Packed]:
    """Write the files of each part as shards to a folder of its name in `out` ("": to `out` itself): all, or nothing.

    An `out` that exists is replaced, in the end. `done` is told how many more images are written, from several threads.
    """
    sizes, plan = _plan_state(parts, settings)
    work = out.with_name(f".{out.name}.packing")
    lock = FileLock(work / "lock")
    lock_folder(lock, f"packing to {out}", "choose another place for --shards")
    try:
        _start_or_go_on(work, plan)
        packed = {
            part: _pack_part(source, sizes[part], work / "notes" / part, work / _SHARDS / part, settings, workers, done)
            for part, source in parts.items()
        }
        if out.exists():  # empty, or the caller was told to overwrite it
            os.rename(out, partial_path(out))
        os.rename(work / _SHARDS, out)
        sweep(out)
        remove_partial(work)
    finally:
        lock.release()
    return packed


def _pack_part(
    source: FileSource, sizes: list[int], notes: Path, shards: Path, settings: PackSettings, workers: int,
    done: Callable[[int], None],
) -> Packed:  # fmt: skip
    """Write one source's shards and manifest to `shards`, but for those that have a note in `notes`."""
    relative = [
        "/".join(part for part in PurePosixPath(file).parts if part not in ("/", "..")) for file in source.files
    ]
    keys = member_keys(relative)
    order = np.arange(len(source)) if settings.seed is None else epoch_order(len(source), settings.seed, epoch=0)
    planned = plan_shards(sizes, order, settings.shard_bytes, settings.images_per_shard)
    for folder in (notes, shards):
        folder.mkdir(parents=True, exist_ok=True)

    def one(number: int) -> ShardNote:
        bad: list[tuple[int, str]] = []
        path = shards / f"shard-{number:05d}.tar"
        kept = notes / f"{path.stem}.note"
        note = _read_note(kept, path)
        if note is None:
            note = write_shard(path, _examples(source, relative, keys, planned[number], settings.check, bad, done))
            note.bad = bad
            write_atomic(kept, json.dumps(asdict(note)))
        else:
            done(len(planned[number]))
        return note

    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        try:
            found = list(pool.map(one, range(len(planned))))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    manifest = Manifest([note.entry for note in found], _index(source, found), settings.seed)
    if not len(manifest.index):
        raise UserError(f"none of the {len(source)} files of {source.name} is a readable image")
    write_manifest(shards, manifest)
    return Packed(manifest, sorted((source.key(number), reason) for note in found for number, reason in note.bad))


def verify_shards(folder: Path, done: Callable[[int], None] = lambda size: None) -> list[str]:
    """Read every shard of a packed folder and compare sizes and hashes; what is wrong, in words."""
    manifest = read_manifest(folder / MANIFEST)
    wrong = []
    for entry in manifest.shards:
        try:
            with open(folder / entry.name, "rb") as file:
                digest = hashlib.sha256()
                while chunk := file.read(2**20):
                    digest.update(chunk)
                    done(len(chunk))
                size = file.tell()
        except OSError as error:
            wrong.append(f"{entry.name}: {error.strerror}")
            continue
        if size != entry.bytes:
            wrong.append(f"{entry.name}: {size:,} bytes instead of {entry.bytes:,}")
        elif digest.hexdigest() != entry.sha256:
            wrong.append(f"{entry.name}: its content has changed (sha256)")
    return wrong


def _plan_state(parts: Mapping[str, FileSource], settings: PackSettings) -> tuple[dict[str, list[int]], str]:
    """The files' sizes, and a digest of all that decides what the shards will be."""
    digest = hashlib.sha256(json.dumps([2, asdict(settings)]).encode())
    sizes: dict[str, list[int]] = {}
    for part, source in parts.items():
        digest.update(json.dumps([part, len(source), source.classes]).encode())
        sizes[part] = []
        for file in source.files:
            try:
                status = os.stat(source.folder / file)
            except OSError as error:
                raise UserError(f"{source.folder / file} cannot be read: {error.strerror}") from error
            sizes[part].append(status.st_size)
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return sizes, digest.hexdigest()


def _start_or_go_on(work: Path, plan: str) -> None:
    """Keep the finished shards of a pack that was stopped, if it was the same one; else clear them away."""
    try:
        same = (work / "plan").read_text() == plan
    except OSError:
        same = False
    for path in work.iterdir():
        if not same and path.name != "lock":
            remove_partial(path)
    for left in work.glob(f"{_SHARDS}/**/*.partial"):
        remove_partial(left)
    write_atomic(work / "plan", plan)


def _read_note(kept: Path, shard: Path) -> ShardNote | None:
    try:
        note = ShardNote(**json.loads(kept.read_text()))
        return note if shard.stat().st_size == note.bytes else None
    except (OSError, ValueError, TypeError):
        return None


def _examples(
    source: FileSource,
    relative: list[str],
    keys: list[str],
    numbers: Ids,
    check: bool,
    bad: list[tuple[int, str]],
    done: Callable[[int], None],
) -> Iterator[Example]:
    for number in numbers.tolist():
        path = source.folder / source.files[number]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; repair it or take it away") from error
        reason = _fault(data) if check else None
        if reason is None:
            label = -1 if source.labels is None else int(source.labels[number])
            yield Example(number, data, keys[number], path.suffix[1:].lower(), label, relative[number])
        else:
            bad.append((number, reason))
        done(1)


def _fault(data: bytes) -> str | None:
    try:
        decode_stream(io.BytesIO(data))
    except BadImage as error:
        return error.reason
    return None


def _index(source: FileSource, notes: Sequence[ShardNote]) -> ShardIndex:
    """The index in the order of the folder, so that an image has the same id in both, and a run the same views."""
    table = np.array(
        [(number, shard, offset, size) for shard, note in enumerate(notes) for number, offset, size in note.rows],
        dtype=np.int64,
    ).reshape(-1, 4)
    table = table[np.argsort(table[:, 0])]
    numbers = table[:, 0]
    labels = np.full(len(table), -1, dtype=np.int64) if source.labels is None else source.labels[numbers]
    names = PackedNames.of(source.files[number] for number in numbers.tolist())
    shard, offset, size = (np.ascontiguousarray(column) for column in table.T[1:])
    return ShardIndex(shard, offset, size, np.ascontiguousarray(labels), names, source.classes or [])
