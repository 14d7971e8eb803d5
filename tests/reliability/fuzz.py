"""Promise 15: mutated manifests, headers, settings, indexes and tars raise only UserError, within 5 seconds.

A case is a function that writes a mutated file and opens it. Opening it without an error is accepted too, because some
mutations are valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from snclr.checkpoint import format as module
from snclr.checkpoint.encoder_file import load_encoder, save_encoder
from snclr.checkpoint.external_weights import read_weights
from snclr.checkpoint.format import load_checkpoint, save_checkpoint
from snclr.data.datasets import folder as folders
from snclr.data.datasets.base import open_dataset
from snclr.data.datasets.folder import list_images
from snclr.data.decode import BadImage
from snclr.data.shards.index import PackedNames, ShardIndex
from snclr.data.shards.manifest import INDEX, MANIFEST, Manifest, ShardEntry, write_manifest
from snclr.errors import UserError
from snclr.models.encoders import EncoderSpec, resolve_encoder
from snclr.train.load_run import config_for_resume
from snclr.train.metrics import read_metrics
from tests.reliability.harness import SETTINGS, Sandbox
from tests.reliability.payloads import _resign

MAX_SECONDS = 5.0
MUTATIONS = 50
"""Mutations per trial."""

_EXTREME_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x"),
    *("\0", "../../etc/passwd", "/dev/zero", "\ud800", "é" * 300, [], {}, [[]], {"a": {}}, [1, 2, 3], {"": None}),
    *([0] * 1000, {str(i): i for i in range(300)}, "step-0000000001", "F32", "nan", "1e999", "-0"),
]
_EXTREME_BYTES = [
    *(b"\0", b"\xff\xfe", b"{", b"}", b"[" * 3000, b'"', b":", b",", b"\n", b"\t", b"- ", b"? ", b"&a *a", b"!!int "),
    *(b"!!set", b"2001-99-99", b"9" * 5000, b"1:2:3:4", b"<<: *x", b"0x", b".inf", b"NaN", b"1e400", b"\\ud800"),
    *(b"%YAML 9.9\n---\n", b"!!timestamp 1", b"!!binary x", b"---\n", b"...\n", b"\xc3", b"\xe2\x80\xa8", b"&a [*a]"),
    *(b"*b", b"true: 1\n", b"1: 2\n"),
]  # fmt: skip
_NESTED_ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


def fuzz(sandbox: Sandbox, seed: int) -> None:
    """Open `MUTATIONS` mutated files of one kind."""
    kind = list(CASES)[seed % len(CASES)]
    chance = random.Random(seed)
    work = sandbox.root / f"fuzz-{kind}"
    if not work.exists():
        work.mkdir()
        _prepare(work)
    for number in range(MUTATIONS):
        case = f"{kind}, seed {seed}, mutation {number}"
        began, worked = time.monotonic(), time.process_time()
        try:
            CASES[kind](work, chance)
        except UserError as error:
            if not str(error):
                raise AssertionError(f"{case}: an error without a message") from error
        except Exception as error:
            keep = sandbox.root.parent / f"failed-{kind}-{seed}-{number}"
            shutil.copytree(work, keep, dirs_exist_ok=True)
            raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error
        took = time.process_time() - worked  # CPU time, because the machine may be busy
        assert took < MAX_SECONDS, f"{case}: {took:.1f} s"
        assert time.monotonic() - began < 12 * MAX_SECONDS, f"{case}: hung"


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, repeat or replace a few bytes."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        offset = chance.randrange(len(out) + 1)
        kind = chance.randrange(6)
        if kind == 0 and out:
            out[offset % len(out)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[offset:offset] = chance.choice(_EXTREME_BYTES)
        elif kind == 2:
            del out[offset : offset + chance.randrange(1, 40)]
        elif kind == 3:
            out[offset:offset] = out[offset : offset + chance.randrange(1, 200)]
        elif kind == 4:
            out[offset : offset + chance.randrange(1, 20)] = chance.choice(_EXTREME_BYTES)
        else:
            del out[offset:]
    return bytes(out)


def mutate_value(value: Any, chance: random.Random) -> Any:
    """Return the JSON value with one entry changed, added or removed."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        copy = dict(value)
        key = chance.choice(list(copy))
        how = chance.random()
        if how < 0.1:
            del copy[key]
        elif how < 0.2:
            copy[chance.choice(("", "x", "schema", "__class__", "step"))] = chance.choice(_EXTREME_VALUES)
        else:
            copy[key] = mutate_value(copy[key], chance)
        return copy
    if isinstance(value, list) and value and chance.random() < 0.7:
        copy_ = list(value)
        copy_[chance.randrange(len(copy_))] = mutate_value(chance.choice(copy_), chance)
        return copy_
    return chance.choice(_EXTREME_VALUES)


def _mutated_json(value: Any, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(1, 4)):
        value = mutate_value(value, chance)
    data = json.dumps(value).encode()
    return mutate_bytes(data, chance) if chance.random() < 0.4 else data


def _prepare(work: Path) -> None:
    tensors = {"method/w": torch.arange(6.0).reshape(2, 3), "method/n": torch.tensor(3), "optimizer/0/m": torch.ones(4)}
    info = {
        "precision": {},
        "data": "x",
        "skipped": [{"index": 1, "key": "a", "reason": "b"}],
    }
    save_checkpoint(work / "checkpoints", tensors, info, step=1)
    from snclr.models.encoders import build_encoder
    from snclr.train.config import resolve

    spec = resolve_encoder("resnet10-tiny", image_size=16, stem="half")
    save_encoder(build_encoder(spec), spec, work)
    settings = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
    (work / "settings.yaml").write_text(yaml.safe_dump(resolve(settings).to_dict()))
    (work / "manifest").write_bytes((work / "checkpoints" / "step-0000000001" / module.MANIFEST).read_bytes())
    (work / "tensors").write_bytes((work / "checkpoints" / "step-0000000001" / module.TENSORS).read_bytes())
    (work / "info").write_bytes((work / "checkpoints" / "step-0000000001" / module.INFO).read_bytes())
    (work / "weights").write_bytes((work / "encoder.safetensors").read_bytes())
    (work / "description").write_bytes((work / "config.json").read_bytes())
    (work / "a.png").write_bytes(b"no image, but a file")


def _checkpoint(work: Path) -> Path:
    """Restore the original checkpoint and return its path."""
    path = work / "checkpoints" / "step-0000000001"
    for name, kept in ((module.MANIFEST, "manifest"), (module.TENSORS, "tensors"), (module.INFO, "info")):
        shutil.copyfile(work / kept, path / name)
    return path


def _manifest(work: Path, chance: random.Random) -> None:
    path = _checkpoint(work)
    body = json.loads((path / module.MANIFEST).read_bytes())
    if chance.random() < 0.5:  # with a correct hash, so that the checks after it are reached
        del body["manifest_sha256"]
        body = mutate_value(body, chance)
        data = module._manifest_bytes(body) if isinstance(body, dict) else json.dumps(body).encode()
    else:
        data = _mutated_json(body, chance)
    (path / module.MANIFEST).write_bytes(data)
    load_checkpoint(path)


def _header(data: bytes, chance: random.Random) -> bytes:
    """Return a safetensors file with a mutated header, with a correct or wrong length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = _mutated_json(header, chance) if chance.random() < 0.8 else mutate_bytes(data[8 : 8 + length], chance)
    wrong = chance.random() < 0.2
    number = chance.choice((0, 1, 2**32, 2**63, 2**64 - 1, len(text) + 1, 10**8)) if wrong else len(text)
    return number.to_bytes(8, "little") + text + data[8 + length :]


def _tensors(work: Path, chance: random.Random) -> None:
    path = _checkpoint(work)
    (path / module.TENSORS).write_bytes(_header((work / "tensors").read_bytes(), chance))
    _resign(path)
    load_checkpoint(path)


def _info(work: Path, chance: random.Random) -> None:
    path = _checkpoint(work)
    (path / module.INFO).write_bytes(_mutated_json(json.loads((work / "info").read_bytes()), chance))
    _resign(path)
    load_checkpoint(path)


def _foreign(work: Path, chance: random.Random) -> None:
    (work / "w.safetensors").write_bytes(_header((work / "weights").read_bytes(), chance))
    read_weights(work / "w.safetensors", resolve_encoder("resnet10-tiny", image_size=16, stem="half"))


def _torch_file(work: Path, chance: random.Random) -> None:
    if not (work / "w.pt").exists():
        torch.save({"state_dict": {"a": torch.ones(3), "b": [1, 2]}}, work / "w.pt")
    (work / "m.pt").write_bytes(mutate_bytes((work / "w.pt").read_bytes(), chance))
    read_weights(work / "m.pt", resolve_encoder("resnet10-tiny", image_size=16, stem="half"))


def _description(work: Path, chance: random.Random) -> None:
    """Mutate config.json or the description of the encoder in it."""
    saved = json.loads((work / "description").read_bytes())
    if chance.random() < 0.5:
        saved["snclr"]["encoder"] = mutate_value(saved["snclr"]["encoder"], chance)
        (work / "config.json").write_bytes(json.dumps(saved).encode())
        EncoderSpec.from_dict(saved["snclr"]["encoder"])
    else:
        (work / "config.json").write_bytes(_mutated_json(saved, chance))
    load_encoder(work)


def _settings(work: Path, chance: random.Random) -> None:
    """Mutate config.yaml, as text or as values."""
    text = (work / "settings.yaml").read_bytes()
    how = chance.random()
    if how < 0.02:
        data = _NESTED_ALIASES.encode() + f"{chance.choice(('encoder', 'data', 'lr', 'x'))}: *i\n".encode()
    elif how < 0.5:
        data = mutate_bytes(text, chance)
    else:
        values = mutate_value(yaml.safe_load(text), chance)
        try:
            data = yaml.safe_dump(values, allow_unicode=True).encode(errors="surrogatepass")
        except yaml.YAMLError:
            data = repr(values).encode(errors="surrogatepass")
    (work / "config.yaml").write_bytes(data)
    config_for_resume({"out": str(work), "resume": True})


def _metrics(work: Path, chance: random.Random) -> None:
    lines = b"".join(b'{"step": %d, "epoch": 0.5, "loss": 2.5}\n' % i for i in range(1, 9))
    (work / "metrics.jsonl").write_bytes(mutate_bytes(lines, chance))
    read_metrics(work)


def _list(work: Path, chance: random.Random) -> None:
    (work / "list.txt").write_bytes(mutate_bytes(b"a.png\tcat\n# comment\na.png\tdog\na.png\n", chance))
    open_dataset(work / "list.txt")


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (200, 100, 50)).save(buffer, "PNG")
    return buffer.getvalue()


def _tar(form: int) -> bytes:
    """Return a small shard with a long name, a label file, JSON metadata, an empty file, a link and a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, content in (
            *(("a.png", _png()), ("a.cls", b"7"), ("b" * 90 + "/" + "n" * 90 + ".png", _png())),
            *(("c.json", b'{"label": "cat"}'), ("c.é.png", _png()), ("empty.png", b"")),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, kind in (("link.png", tarfile.SYMTYPE), ("folder.png", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    return buffer.getvalue()


@contextlib.contextmanager
def _cache(value: str) -> Iterator[None]:
    """Set SNCLR_CACHE inside the block."""
    before = os.environ.get("SNCLR_CACHE")
    os.environ["SNCLR_CACHE"] = value
    try:
        yield
    finally:
        os.environ.pop("SNCLR_CACHE")
        if before is not None:
            os.environ["SNCLR_CACHE"] = before


def _read_all(path: Path) -> None:
    dataset = open_dataset(path)
    for index in range(min(len(dataset), 20)):
        dataset.key(index)
        try:
            dataset.load(index)
        except BadImage:
            continue


def _shards(work: Path, chance: random.Random) -> None:
    """Mutate shards.json, or the index with a correct hash in shards.json."""
    folder = work / "packed"
    if not folder.exists():
        folder.mkdir()
        data = _tar(tarfile.USTAR_FORMAT)
        (folder / "0.tar").write_bytes(data)
        entry = ShardEntry("0.tar", len(data), hashlib.sha256(data).hexdigest(), 2)
        columns = {name: torch.tensor(rows).numpy() for name, rows in (("offset", [512, 1536]), ("size", [80, 1]))}
        zeros = torch.zeros(2, dtype=torch.int64).numpy()
        names = PackedNames.of(["a.png", "b.png"])
        index = ShardIndex(zeros, columns["offset"], columns["size"], zeros, names, ["cat"])
        write_manifest(folder, Manifest([entry], index), seed=0)
        for name in (MANIFEST, INDEX):
            shutil.copyfile(folder / name, work / f"original-{name}")
    manifest = json.loads((work / f"original-{MANIFEST}").read_bytes())
    index_file = (work / f"original-{INDEX}").read_bytes()
    if chance.random() < 0.4:
        index_file = _header(index_file, chance) if chance.random() < 0.6 else mutate_bytes(index_file, chance)
        manifest["index"]["sha256"] = hashlib.sha256(index_file).hexdigest()
        text = json.dumps(manifest).encode()
    else:
        text = _mutated_json(manifest, chance)
    (folder / INDEX).write_bytes(index_file)
    (folder / MANIFEST).write_bytes(text)
    _read_all(folder)


def _tars(work: Path, chance: random.Random) -> None:
    """Mutate a tar, often with correct checksums of its headers."""
    data = bytearray(_tar(chance.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))))
    for _ in range(chance.randrange(4)):  # a field of a header: name, size, checksum, type, magic, prefix
        header = 512 * chance.randrange(len(data) // 512)
        start, length = chance.choice(((0, 100), (124, 12), (148, 8), (156, 1), (257, 8), (345, 155)))
        size = chance.randrange(1, length + 1)
        fill = chance.choice((chance.randbytes(size), bytes(size), b"7" * size, b"\x80" + b"\xff" * (size - 1)))
        data[header + start : header + start + size] = fill
        if chance.random() < 0.7:
            block = data[header : header + 512]
            total = sum(block) - sum(block[148:156]) + 8 * 32
            data[header + 148 : header + 156] = b"%06o\0 " % total
    (work / "m.tar").write_bytes(mutate_bytes(bytes(data), chance) if chance.random() < 0.5 else bytes(data))
    with _cache("off"):
        _read_all(work / "m.tar")


def _folder_index(work: Path, chance: random.Random) -> None:
    """Mutate the cached index of a folder. With a wrong hash it must not be used."""
    top = work / "tree"
    smallest, folders.MIN_FILES = folders.MIN_FILES, 0
    try:
        with _cache(str(work / "cache")):
            if not top.exists():
                for name in ("a/1.png", "a/2.png", "b/3.png"):
                    (top / name).parent.mkdir(parents=True, exist_ok=True)
                    (top / name).write_bytes(b"x")
                for path in (top, top / "a", top / "b"):
                    os.utime(path, ns=(10**9, 10**9))  # old enough that the index is trusted
                list_images(top)
                (kept,) = (work / "cache" / "folder-index").iterdir()
                shutil.copyfile(kept, work / "original-list")
            (kept,) = (work / "cache" / "folder-index").iterdir()
            digest, _, content = (work / "original-list").read_bytes().partition(b"\n")
            how = _mutated_json if chance.random() < 0.5 else mutate_bytes
            content = how(json.loads(content) if how is _mutated_json else content, chance)
            signed = chance.random() < 0.8
            if signed:
                digest = hashlib.sha256(content).hexdigest().encode()
            kept.write_bytes(digest + b"\n" + content)
            found = list_images(top)
            assert signed or found == ["a/1.png", "a/2.png", "b/3.png"], found
    finally:
        folders.MIN_FILES = smallest


CASES: dict[str, Callable[[Path, random.Random], None]] = {
    "manifest": _manifest,
    "settings": _settings,
    "tensors": _tensors,
    "info": _info,
    "foreign": _foreign,
    "description": _description,
    "torch file": _torch_file,
    "metrics": _metrics,
    "list": _list,
    "shards": _shards,
    "folder index": _folder_index,
    "tar": _tars,
}
