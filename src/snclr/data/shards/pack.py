"""Pack a folder of images into shards with a manifest, and verify such shards.

The same folder gives the same bytes. Shards are written to a hidden folder beside the output, so that an interrupted
pack resumes after its finished shards; the folder is renamed when all shards are complete.
"""

import contextlib
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from snclr.data.datasets.base import FileDataset, open_dataset
from snclr.data.datasets.folder import split_folder
from snclr.data.decode import BadImage, decode_stream
from snclr.data.remote import map_in_threads
from snclr.data.sampler import Ids, epoch_order
from snclr.data.shards.index import ShardIndex, read_members
from snclr.data.shards.manifest import MANIFEST, Manifest, ShardEntry, read_manifest, write_manifest
from snclr.errors import UserError, count
from snclr.io.atomic import atomic_writer, partial_path, remove_leftovers, remove_partial, write_atomic
from snclr.io.hashing import sha256_file
from snclr.io.locking import FileLock, lock_folder
from snclr.runtime.progress import Progress
from snclr.runtime.results import Result

_SPLITS = ("train", "val", "test")
_SHARDS = "shards"  # subfolder of the hidden folder that becomes the output


@dataclass(frozen=True)
class PackSettings:
    """Everything that determines the bytes of the shards. `seed` shuffles images over shards; None keeps their order.

    With `check`, files that cannot be decoded are skipped.
    """

    shard_bytes: int
    images_per_shard: int | None = None
    seed: int | None = 0
    check: bool = False

    def __post_init__(self) -> None:
        if self.images_per_shard is not None and self.images_per_shard < 1:
            raise UserError(f"--images-per-shard is {self.images_per_shard}; it must be at least 1")


@dataclass(frozen=True)
class PackedSplit:
    """The shards of one split; `digest` changes with any byte of them."""

    images: int
    files: int
    bytes: int
    classes: int
    digest: str


@dataclass(frozen=True)
class SkippedFile:
    """A file that is not a readable image."""

    key: str
    reason: str


@dataclass(frozen=True)
class PackResult(Result):
    """What `pack` wrote: totals, splits by name (`all` for a folder without splits), and skipped files."""

    shards: str
    images: int
    files: int
    bytes: int
    parts: dict[str, PackedSplit]
    skipped: list[SkippedFile]


@dataclass(frozen=True)
class VerifyResult(Result):
    """What `verify_shards` read, and a description of each damaged shard."""

    shards: str
    files: int
    images: int
    bytes: int
    wrong: list[str]


def pack_folder(
    folder: str | Path,
    out: str | Path,
    settings: PackSettings,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> PackResult:
    """Write the files of a folder or list, split by split, as shards to `out`: all of them, or nothing."""
    out = Path(out).expanduser()
    _check_output(out, overwrite)
    splits = _open_splits(folder)
    sizes, plan = _plan(splits, settings)
    work = out.with_name(f".{out.name}.packing")
    lock = FileLock(work / "lock")
    lock_folder(lock, f"packing to {out}", "choose another folder for --shards")
    parts: dict[str, PackedSplit] = {}
    skipped: list[SkippedFile] = []
    try:
        _resume_or_clear(work, plan)
        with Progress(f"packing {folder}", sum(map(len, splits.values())), quiet=quiet) as progress:
            for name, dataset in splits.items():
                job = _SplitJob(dataset, sizes[name], work / _SHARDS / name, settings)
                manifest, bad = job.run(workers or os.cpu_count() or 1, progress)
                skipped += [replace(file, key=f"{name}/{file.key}") if name else file for file in bad]
                index, size = manifest.index, sum(entry.bytes for entry in manifest.shards)
                counts = (len(index), len(manifest.shards), size, len(index.classes))
                parts[name or "all"] = PackedSplit(*counts, manifest.digest())
        if out.exists():  # empty, or to be overwritten
            os.rename(out, partial_path(out))
        os.rename(work / _SHARDS, out)
        remove_leftovers(out)
        remove_partial(work)
    finally:
        lock.release()
    images, files, size = (sum(getattr(p, name) for p in parts.values()) for name in ("images", "files", "bytes"))
    return PackResult(str(out), images, files, size, parts, skipped)


def verify_folder(folder: str | Path, *, quiet: bool = False) -> VerifyResult:
    """Compare every packed shard of a folder and its splits with the hash in the manifest."""
    top = Path(folder).expanduser()
    folders = _packed_folders(top)
    if not folders:
        raise UserError(f"there is no {MANIFEST} in {top}; give a folder that `snclr pack` wrote")
    manifests = [read_manifest(path / MANIFEST) for path in folders]
    shards = [(path / e.name, e) for path, m in zip(folders, manifests, strict=True) for e in m.shards]
    total = sum(entry.bytes for _, entry in shards)
    wrong = []
    with Progress(f"verifying {top}", total, unit="bytes", quiet=quiet) as progress:
        for path, entry in shards:
            try:
                problem = "" if sha256_file(path, progress.update) == entry.sha256 else "its content has changed"
            except OSError as error:
                problem = error.strerror or str(error)
            if problem:
                wrong.append(f"{path.relative_to(top)}: {problem}")
    return VerifyResult(str(top), len(shards), sum(len(manifest.index) for manifest in manifests), total, wrong)


def plan_shards(sizes: Sequence[int], order: Ids, settings: PackSettings) -> list[list[int]]:
    """Divide the images, in `order` (n,), into shards of about `shard_bytes`, or of `images_per_shard` images.

    >>> plan_shards([400, 400, 400], np.arange(3), PackSettings(shard_bytes=2000))
    [[0], [1], [2]]
    """
    count = settings.images_per_shard
    parts: list[list[int]] = [[]]
    filled = 0
    for index in order.tolist():
        blocks = 3 + -(-sizes[index] // tarfile.BLOCKSIZE)  # header, content, and two blocks for the label
        size = blocks * tarfile.BLOCKSIZE
        full = len(parts[-1]) >= count if count else filled + size > settings.shard_bytes
        if parts[-1] and full:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += size
    return parts


def member_keys(files: Sequence[str]) -> list[str]:
    """Return a WebDataset key for each file: unique, and without a dot in its last part.

    >>> member_keys(["a/x.jpg", "a/x.png", "a/y.1.jpg"])
    ['a/x', 'a/x-2', 'a/y_1']
    """
    keys: dict[str, None] = {}
    for file in files:
        path = PurePosixPath(file)
        base = str(path.with_name(path.stem.replace(".", "_") or "_"))
        key, count = base, 1
        while key in keys:
            count += 1
            key = f"{base}-{count}"
        keys[key] = None
    return list(keys)


class _SplitJob:
    """Write the shards and the manifest of one split, except for shards that are already finished."""

    def __init__(self, dataset: FileDataset, sizes: list[int], folder: Path, settings: PackSettings) -> None:
        self.dataset, self.folder, self.settings = dataset, folder, settings
        # Members must not have absolute names or names with `..`.
        self.files = ["/".join(p for p in PurePosixPath(f).parts if p not in ("/", "..")) for f in dataset.files]
        self.keys = member_keys(self.files)
        self.members = [key + PurePosixPath(f).suffix.lower() for key, f in zip(self.keys, self.files, strict=True)]
        n, seed = len(dataset), settings.seed
        self.labels = np.full(n, -1, np.int64) if dataset.labels is None else dataset.labels
        order = np.arange(n) if seed is None else epoch_order(n, seed, epoch=0)
        self.plan = plan_shards(sizes, order, settings)

    def run(self, workers: int, progress: Progress) -> tuple[Manifest, list[SkippedFile]]:
        """Write all shards in a thread pool, then the manifest; return it, and the files that are not images."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries: list[ShardEntry] = []
        rows: list[tuple[int, int, int, int]] = []  # image, shard, offset, size
        with contextlib.closing(map_in_threads(self._write, range(len(self.plan)), workers)) as written:
            for number, (entry, images) in enumerate(written):
                entries.append(entry)
                rows += [(index, number, offset, size) for index, offset, size in images]
                progress.update(len(self.plan[number]))
        if not rows:
            raise UserError(f"{self.dataset.name} has no readable image among {count(len(self.dataset), 'file')}")
        rows.sort()  # in the order of the folder: an image has the same id in both, and so the same views
        packed = [row[0] for row in rows]
        names = [self.dataset.files[index] for index in packed]
        index = ShardIndex.of_rows([row[1:] for row in rows], self.labels[packed], names, self.dataset.classes or [])
        manifest = Manifest(entries, index)
        write_manifest(self.folder, manifest, self.settings.seed)
        skipped = []
        for number in sorted(set(range(len(self.dataset))) - set(packed), key=self.dataset.key):
            try:
                self.dataset.load(number)
            except BadImage as error:
                skipped.append(SkippedFile(self.dataset.key(number), str(error)))
        return manifest, skipped

    def _write(self, number: int) -> tuple[ShardEntry, list[tuple[int, int, int]]]:
        """Write one shard unless it is finished; return its entry and (index, offset, size) of each image."""
        path = self.folder / f"shard-{number:05d}.tar"
        if not path.exists():
            write_shard(path, self._contents(self.plan[number]))
        index_of = {self.members[index]: index for index in self.plan[number]}
        images = [(index_of[m.name], m.offset, m.size) for m in read_members(path) if m.name in index_of]
        return ShardEntry(path.name, path.stat().st_size, sha256_file(path), len(images)), images

    def _contents(self, indices: list[int]) -> Iterator[tuple[str, bytes]]:
        """Yield the members of one shard; with `check`, leave out unreadable images."""
        for index in indices:
            path = self.dataset.folder / self.dataset.files[index]
            try:
                data = path.read_bytes()
                if self.settings.check:
                    decode_stream(io.BytesIO(data))
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}; repair or remove it") from error
            except BadImage:
                continue
            yield self.members[index], data
            if self.labels[index] >= 0:
                yield f"{self.keys[index]}.cls", b"%d" % self.labels[index]
            if self.keys[index] + path.suffix != self.files[index]:
                yield f"{self.keys[index]}.json", json.dumps({"file": self.files[index]}).encode()


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (name, content) pairs as a tar, atomically; its bytes depend on them alone."""
    with (
        atomic_writer(path, 0) as file,
        tarfile.open(None, "w", file, format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as tar,
    ):
        for name, content in members:
            info = tarfile.TarInfo(name)  # without time and owner
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _check_output(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it holds shards and may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _packed_folders(out):
        raise UserError(f"{out} exists and was not written by `snclr pack`; choose another folder for --shards")
    if not overwrite:
        raise UserError(f"{out} already holds shards; choose another folder, or replace them with --overwrite")


def _packed_folders(top: Path) -> list[Path]:
    return [top / split for split in ("", *_SPLITS) if (top / split / MANIFEST).is_file()]


def _open_splits(folder: str | Path) -> dict[str, FileDataset]:
    """Open the splits of a folder by name, or all of it under an empty name."""
    top = Path(folder).expanduser()
    names = [""]
    if top.is_dir() and split_folder(top, "train") != top:
        names = [name for name in _SPLITS if (top / name).is_dir()]
    splits = {}
    for name in names:
        dataset = open_dataset(top if top.exists() else folder, split=name or "all")
        if not isinstance(dataset, FileDataset):
            raise UserError(f"{folder} is not a folder or list of image files; only those can be packed")
        splits[name] = dataset
    return splits


def _plan(splits: dict[str, FileDataset], settings: PackSettings) -> tuple[dict[str, list[int]], str]:
    """Return the file sizes, and a digest of everything that determines the shards."""
    digest = hashlib.sha256(json.dumps([3, asdict(settings)]).encode())
    sizes: dict[str, list[int]] = {}
    for name, dataset in splits.items():
        digest.update(json.dumps([name, len(dataset), dataset.classes]).encode())
        sizes[name] = []
        for file in dataset.files:
            try:
                status = os.stat(dataset.folder / file)
            except OSError as error:
                raise UserError(f"{dataset.folder / file} cannot be read: {error.strerror}") from error
            sizes[name].append(status.st_size)
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return sizes, digest.hexdigest()


def _resume_or_clear(work: Path, plan: str) -> None:
    """Keep the finished shards of an interrupted pack with the same plan; delete everything else."""
    saved = work / "plan"
    same = saved.is_file() and saved.read_text() == plan
    leftovers = work.glob(f"{_SHARDS}/**/*.partial") if same else work.iterdir()
    for path in list(leftovers):
        if path.name != "lock":
            remove_partial(path)
    write_atomic(saved, plan)
