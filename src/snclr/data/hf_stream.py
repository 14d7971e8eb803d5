"""A stream of images written once as shards on disk, then read like any others.

A stream can only be read forwards: no order of our own, no exact resume, no neighbours by name. Its images are copied
to the cache folder as they come, shard by shard; a copy that was stopped goes on behind its last whole shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.cache import cache_folder, cache_name
from snclr.data.folder import number_labels
from snclr.data.huggingface import Spec, find_columns, image_cell, label_texts, load, undecoded
from snclr.data.packed import PackedNames
from snclr.data.shard_index import ShardIndex
from snclr.data.shard_manifest import MANIFEST, Manifest, write_manifest
from snclr.data.shard_writer import Example, ShardNote, write_shard
from snclr.data.shards import ShardSource, open_shards
from snclr.durable import FileLock, write_atomic
from snclr.errors import UserError
from snclr.progress import Progress

_SHARD_IMAGES = 10_000
_SHARD_BYTES = 500_000_000
# The first bytes of a file, and the ending its member gets.
_ENDINGS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif"}  # fmt: skip  # noqa: E501


def open_stream(text: str, spec: Spec, split: str) -> ShardSource:
    """Open the copy of what `hf-stream:…` names, made first where it is not complete."""
    folder = cache_folder()
    if folder is None:
        raise UserError(f"{text} is copied to the cache folder, and SNCLR_CACHE is off; set SNCLR_CACHE to a folder")
    limit = spec.options.get("limit")
    if limit is not None and not (limit.isdigit() and int(limit) > 0):
        raise UserError(f"{text!r}: limit must be a number of images above 0")
    place = folder / "hf-stream" / cache_name(text, split if spec.split is None else "")
    if not (place / MANIFEST).is_file():
        stream = load(text, spec, split, streaming=True)
        copy_stream(
            stream, place, name=text, image=spec.options.get("image"), label=spec.options.get("label"),
            limit=None if limit is None else int(limit),
        )  # fmt: skip
    return open_shards(place, name=text)


def copy_stream(
    stream: Any,
    place: Path,
    *,
    name: str,
    image: str | None = None,
    label: str | None = None,
    limit: int | None = None,
    quiet: bool = False,
) -> None:
    """Write an IterableDataset's images as shards with a manifest to a folder; goes on where a copy was stopped."""
    columns = find_columns(stream.features, name, image=image, label=label)
    kind = None if columns[1] is None else stream.features[columns[1]]
    stream = undecoded(stream, columns[0])
    place.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / "lock")
    lock.acquire(7 * 24 * 3600.0)  # another process copies the same: wait for it
    try:
        if (place / MANIFEST).is_file():
            return
        notes, labels, state = _finished(place)
        if state is not None:
            stream.load_state_dict(state)
        count = len(labels)
        with Progress(f"copying {name}", limit, initial=count, quiet=quiet) as progress:
            progress.say(f"copying {name} to {place}, once; needs as much space as its images take")
            rows = islice(enumerate(iter(stream), start=count), None if limit is None else limit - count)
            while True:
                values: list[Any] = []
                path = place / f"shard-{len(notes):05d}.tar"
                note = write_shard(path, _examples(rows, columns, values))
                if not note.rows:  # the end of the stream
                    path.unlink()
                    break
                texts = label_texts(values, kind)
                _finish(place, note, texts, stream.state_dict())
                notes.append(note)
                labels.extend(texts)
                progress.update(len(texts))
        if not labels:
            raise UserError(f"{name} has no images in it")
        write_manifest(place, Manifest([note.entry for note in notes], _index(notes, labels, kind), None))
        for rubbish in place.glob("*.note"):
            rubbish.unlink()
    finally:
        lock.release()


def _examples(rows: Iterator[tuple[int, Any]], columns: tuple[str, str | None], labels: list[Any]) -> Iterator[Example]:
    """The images of one shard, with their labels put into `labels`; never a row more than is used.

    Rows without bytes are kept as empty images: they are counted as bad when they are read.
    """
    filled = 0
    while len(labels) < _SHARD_IMAGES and filled < _SHARD_BYTES:
        found = next(rows, None)
        if found is None:
            return
        number, row = found
        data, path = image_cell(row[columns[0]])
        if data is None and path is not None and Path(path).is_file():
            data = Path(path).read_bytes()
        data = data or b""
        filled += len(data)
        labels.append(None if columns[1] is None else row[columns[1]])
        ending = next((name for magic, name in _ENDINGS.items() if data.startswith(magic)), "jpg")
        yield Example(number, data, f"{number:09d}", ending, -1, f"{number:09d}.{ending}")


def _finish(place: Path, note: ShardNote, labels: list[str | None], state: Any) -> None:
    """Note a shard as finished, with the stream's state behind it."""
    content = {"note": asdict(note), "labels": labels, "state": state}
    write_atomic((place / note.name).with_suffix(".note"), json.dumps(content))


def _finished(place: Path) -> tuple[list[ShardNote], list[str | None], Any]:
    """What an earlier copy finished: the unbroken run of shards from the first on."""
    notes: list[ShardNote] = []
    labels: list[str | None] = []
    state = None
    while True:
        path = place / f"shard-{len(notes):05d}.tar"
        try:
            content = json.loads(path.with_suffix(".note").read_text())
            note = ShardNote(**content["note"])
            if path.stat().st_size != note.bytes:
                break
        except (OSError, ValueError, TypeError, KeyError):
            break
        notes.append(note)
        labels.extend(content["labels"])
        state = content["state"]
    return notes, labels, state


def _index(notes: list[ShardNote], labels: list[str | None], kind: Any) -> ShardIndex:
    table = np.array(
        [(shard, offset, size) for shard, note in enumerate(notes) for _, offset, size in note.rows], dtype=np.int64
    )
    names = getattr(kind, "names", None)
    if names is not None:
        numbers = {name: number for number, name in enumerate(names)}
        label = np.array([-1 if text is None else numbers[text] for text in labels], dtype=np.int64)
        classes = list(names) if (label >= 0).any() else []
    else:
        found, found_classes = number_labels(labels)
        label = np.full(len(labels), -1, dtype=np.int64) if found is None else found
        classes = found_classes or []
    keys = PackedNames.of(f"{number:09d}" for number in range(len(labels)))
    shard, offset, size = (np.ascontiguousarray(column) for column in table.T)
    return ShardIndex(shard, offset, size, label, keys, classes)
