"""Copy a Hugging Face stream once into shards in the cache folder, and read those.

A stream alone has no length, no random access and no exact resume. An interrupted copy resumes after its last complete
shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from snclr.data.cache import cache_path
from snclr.data.datasets.huggingface import Spec, find_columns, image_cell, label_texts, load, undecoded
from snclr.data.labels import encode_labels, sort_classes
from snclr.data.shards.dataset import ShardDataset
from snclr.data.shards.index import ShardIndex
from snclr.data.shards.manifest import MANIFEST, Manifest, ShardEntry, write_manifest
from snclr.data.shards.open import open_shards
from snclr.data.shards.tar import read_members, write_shard
from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.io.locking import FileLock
from snclr.runtime.progress import Progress

_SHARD_IMAGES = 10_000
_SHARD_BYTES = 500_000_000
_LOCK_TIMEOUT_SECONDS = 7 * 24 * 3600.0  # for another process that copies the same stream
# First bytes of a file → suffix of its member
_SUFFIXES = {
    b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif",
    b"MM\0*": "tif",
}  # fmt: skip


def open_stream(text: str, spec: Spec, split: str) -> ShardDataset:
    """Open the local copy of `hf-stream:…`, creating or completing it first if needed."""
    folder = cache_path("hf-stream", text, split if spec.split is None else "")
    if folder is None:
        raise UserError(f"{text} is copied to the cache, but SNCLR_CACHE is off; set SNCLR_CACHE to a folder")
    limit = spec.options.get("limit")
    if limit is not None and not (limit.isdigit() and int(limit) > 0):
        raise UserError(f"{text!r}: limit must be a number of images above 0")
    if not (folder / MANIFEST).is_file():
        stream = load(text, spec, split, streaming=True)
        columns = find_columns(stream.features, text, image=spec.options.get("image"), label=spec.options.get("label"))
        copy_stream(stream, folder, name=text, columns=columns, limit=None if limit is None else int(limit))
    return open_shards(folder, name=text)


def copy_stream(
    stream: Any,
    folder: Path,
    *,
    name: str,
    columns: tuple[str, str | None],
    limit: int | None = None,
    quiet: bool = False,
) -> None:
    """Write the images of an IterableDataset as shards with a manifest; resume an interrupted copy.

    `columns` are those of the images and of the labels.
    """
    feature = None if columns[1] is None else stream.features[columns[1]]
    stream = undecoded(stream, columns[0])
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    lock.acquire(_LOCK_TIMEOUT_SECONDS)
    try:
        if (folder / MANIFEST).is_file():
            return
        # After each shard: the number of shards, the labels of their images, and the state of the stream.
        saved = folder / "progress.json"
        shards, labels, state = json.loads(saved.read_text()) if saved.is_file() else (0, [], None)
        if state is not None:
            stream.load_state_dict(state)
        count = len(labels)
        with Progress(f"copying {name}", limit, done=count, quiet=quiet) as progress:
            progress.say(f"copying {name} to {folder}, which needs the disk space of its images")
            rows = islice(enumerate(iter(stream), start=count), None if limit is None else limit - count)
            while True:
                values: list[Any] = []
                write_shard(_shard(folder, shards), _members(rows, columns, values))
                if not values:  # end of the stream
                    _shard(folder, shards).unlink()
                    break
                shards += 1
                labels += label_texts(values, feature)
                write_atomic(saved, json.dumps([shards, labels, stream.state_dict()]))
                progress.update(len(values))
        if not labels:
            raise UserError(f"{name} has no images")
        _write_manifest(folder, shards, labels, feature)
        saved.unlink()
    finally:
        lock.release()


def _members(
    rows: Iterator[tuple[int, Any]], columns: tuple[str, str | None], labels: list[Any]
) -> Iterator[tuple[str, bytes]]:
    """Yield the images of one shard and append their labels to `labels`, without consuming a row too many.

    Rows without bytes become empty images, which count as bad when they are read.
    """
    filled = 0
    while len(labels) < _SHARD_IMAGES and filled < _SHARD_BYTES:
        item = next(rows, None)
        if item is None:
            return
        index, row = item
        data, path = image_cell(row[columns[0]])
        if data is None and path is not None and Path(path).is_file():
            data = Path(path).read_bytes()
        data = data or b""
        filled += len(data)
        labels.append(None if columns[1] is None else row[columns[1]])
        suffix = next((suffix for magic, suffix in _SUFFIXES.items() if data.startswith(magic)), "jpg")
        yield f"{index:09d}.{suffix}", data


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.tar"


def _write_manifest(folder: Path, shards: int, labels: list[str | None], feature: Any) -> None:
    """Index the copied images; their class names are those of the dataset if it has any."""
    members = [list(read_members(_shard(folder, number))) for number in range(shards)]
    rows = [(number, member.offset, member.size) for number, part in enumerate(members) for member in part]
    known = {label for label in labels if label is not None}
    classes = list(getattr(feature, "names", None) or sort_classes(known)) if known else []
    names = (f"{index:09d}" for index in range(len(labels)))
    index = ShardIndex.of_rows(rows, encode_labels(labels, classes), names, classes)
    entries = [ShardEntry.of(_shard(folder, number), len(part)) for number, part in enumerate(members)]
    write_manifest(folder, Manifest(entries, index, None))
