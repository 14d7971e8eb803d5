"""Checkpoints are whole or absent, whatever happens while they are written or afterwards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.durable import FileLock
from snclr.errors import UserError
from snclr.train import checkpoint as module
from snclr.train.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    UnknownSchema,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def latest(folder: Path, warn: Callable[[str], None] = no_warning) -> Checkpoint:
    found = latest_checkpoint(folder, warn)
    assert found is not None
    return found


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 50), value), "ids": torch.full((7,), int(value), dtype=torch.int64)}


def holds(checkpoint: Checkpoint, value: float) -> bool:
    expected = state(value)
    return checkpoint.tensors.keys() == expected.keys() and all(
        torch.equal(checkpoint.tensors[name], expected[name]) for name in expected
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Change a manifest in a way that keeps it consistent, as another version of the program could have written it."""
    body = {**json.loads((path / "manifest.json").read_text()), **changes}
    del body["manifest_sha256"]
    (path / "manifest.json").write_bytes(module._manifest_bytes(body))


# -------------------- what is saved and read


def test_round_trip_of_every_dtype_and_shape(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(5).bfloat16(),
        "half": torch.randn(3).half(),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "uint8": torch.arange(3, dtype=torch.uint8),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "0-d": torch.tensor(7),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "shared": base,
        "expanded": torch.tensor([1.0]).expand(3, 3),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "negated view": torch._neg_view(torch.randn(3)),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "naïve/名": torch.ones(1),
    }
    info = {"epoch": 2, "nested": {"list": [1, 2.5, None, "ü"]}, "best": float("-inf")}
    loaded = load_checkpoint(save_checkpoint(tmp_path, tensors, info, step=5))
    assert (loaded.step, loaded.info, loaded.path) == (5, info, tmp_path / "step-0000000005")
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got, expected = loaded.tensors[name], tensor.detach().contiguous().resolve_neg()
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
        assert got.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist(), name
        assert not got.requires_grad


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_mixture_is_a_valid_safetensors_file(tmp_path_factory: pytest.TempPathFactory, layout: Any) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in layout.items()}
    loaded = load_checkpoint(save_checkpoint(tmp_path_factory.mktemp("c"), tensors, {}, step=0))
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensors[name]) for name in tensors)


def test_a_state_larger_than_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snclr.train.tensor_file._CHUNK", 1000)
    monkeypatch.setattr(module, "_CHUNK", 777)
    tensors = {"a": torch.randn(3000), "b": torch.randn(1)}
    path = save_checkpoint(tmp_path, tensors, {}, step=1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    for name, entry in listed.items():
        content = (path / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    assert torch.equal(load_checkpoint(path).tensors["a"], tensors["a"])


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:13]))
    assert holds(load_checkpoint(save_checkpoint(tmp_path, state(1), {}, step=1)), 1)


def test_each_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.ones(1),
        "c": torch.ones(3).half(),
        "d": torch.tensor(1),
    }
    content = (save_checkpoint(tmp_path, tensors, {}, step=1) / "tensors.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "a", state(1), {"x": 1}, step=1)
    two = save_checkpoint(tmp_path / "b", dict(reversed(state(1).items())), {"x": 1}, step=1)
    for name in ("tensors.safetensors", "info.json", "manifest.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    loaded = load_checkpoint(path := save_checkpoint(tmp_path, state(1), {}, step=1))
    with open(path / "tensors.safetensors", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    assert holds(loaded, 1)


@pytest.mark.parametrize(
    "bad", [{"x": torch.ones(2, dtype=torch.complex64)}, {"x": 3}, {"x": torch.eye(2).to_sparse()}]
)
def test_what_cannot_be_saved_is_refused_before_writing(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(TypeError, match="'x'"):
        save_checkpoint(tmp_path, bad, {}, step=1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, {}, {"x": object()}, step=1)
    with pytest.raises(ValueError, match="reserved"):
        save_checkpoint(tmp_path, {"__metadata__": torch.ones(1)}, {}, step=1)
    assert names(tmp_path) == []


# -------------------- keeping and pruning


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, state(step), {}, step=step, keep=2)
    assert names(tmp_path) == ["step-0000000030", "step-0000000040"]
    assert latest(tmp_path).step == 40
    with pytest.raises(UserError, match="at least 1"):
        save_checkpoint(tmp_path, state(1), {}, step=50, keep=0)


def test_saving_behind_a_damaged_newer_one_prunes_neither_the_new_one_nor_that(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, state(step), {}, step=step)
    (tmp_path / "step-0000000030" / "info.json").unlink()
    save_checkpoint(tmp_path, state(25), {}, step=25, keep=1)
    assert names(tmp_path) == ["step-0000000025", "step-0000000030"]
    said: list[str] = []
    assert latest(tmp_path, said.append).step == 25
    assert len(said) == 1
    save_checkpoint(tmp_path, state(30), {}, step=30, keep=1)
    assert names(tmp_path) == ["step-0000000030"]
    assert holds(latest(tmp_path), 30)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), {"try": 1}, step=7)
    save_checkpoint(tmp_path, state(2), {"try": 2}, step=7)
    assert names(tmp_path) == ["step-0000000007"]
    found = latest(tmp_path)
    assert holds(found, 2)
    assert found.info == {"try": 2}


def test_an_old_one_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(module, "discard", refuse)
    save_checkpoint(tmp_path, state(2), {}, step=2, keep=1)
    assert "step-0000000001 could not be deleted" in caplog.text
    assert holds(latest(tmp_path), 2)


# -------------------- damage


def damage(path: Path, random_: random.Random) -> str:
    """Truncate, flip a bit of, lengthen or delete one of the files; what was done."""
    file = path / random_.choice(["tensors.safetensors", "info.json", "manifest.json"])
    content = bytearray(file.read_bytes())
    kind = random_.choice(["truncate", "flip", "delete", "lengthen", "zeros"])
    at = random_.randrange(len(content))
    if kind == "delete":
        file.unlink()
        return f"{kind} {file.name}"
    if kind == "truncate":
        del content[at:]
    elif kind == "flip":
        content[at] ^= 1 << random_.randrange(8)
    elif kind == "zeros":
        content[at:] = bytes(len(content) - at)
    else:
        content += b"x"
    file.write_bytes(content)
    return f"{kind} {file.name} at {at}"


def test_every_damage_is_found_and_the_previous_one_used(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    for step in (1, 2):
        save_checkpoint(pristine, state(step), {"step": step, "seed": 12345}, step=step)
    random_ = random.Random(0)
    for trial in range(120):
        folder = tmp_path / str(trial)
        shutil.copytree(pristine, folder)
        newest = folder / "step-0000000002"
        what = damage(newest, random_)
        said: list[str] = []
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(newest)
        found = latest(folder, said.append)
        assert found.step == 1, what
        assert holds(found, 1), what
        assert len(said) == 1, what
        assert str(newest) in said[0]
        shutil.rmtree(folder)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"w": torch.ones(1)}, {}, step=3)
    content = (path / "manifest.json").read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            module._read_manifest(path)


def test_the_damage_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    size = (path / "tensors.safetensors").stat().st_size
    os.truncate(path / "tensors.safetensors", size - 1)
    with pytest.raises(DamagedCheckpoint, match=f"tensors.safetensors has {size - 1} bytes where {size} were written"):
        load_checkpoint(path)
    (path / "tensors.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"tensors\.safetensors is missing"):
        load_checkpoint(path)


def test_none_intact_is_said(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing", no_warning) is None
    for step in (1, 2):
        (save_checkpoint(tmp_path, state(step), {}, step=step) / "tensors.safetensors").unlink()
    said: list[str] = []
    assert latest_checkpoint(tmp_path, said.append) is None
    assert ["step-0000000002" in said[0], "step-0000000001" in said[1], "nothing to resume from" in said[2]] == [
        True
    ] * 3
    with pytest.raises(UserError, match="no checkpoint folder"):
        load_checkpoint(tmp_path / "step-0000000009")


@pytest.mark.parametrize("newer", [2, 999])
def test_an_unknown_schema_is_refused_and_not_passed_over(tmp_path: Path, newer: int) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)
    path = save_checkpoint(tmp_path, state(2), {}, step=2)
    rewrite_manifest(path, schema=newer)
    for attempt in (lambda: load_checkpoint(path), lambda: latest_checkpoint(tmp_path, no_warning)):
        with pytest.raises(UnknownSchema, match=f"schema {newer}") as caught:
            attempt()
        assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"3",
        b"[" * 60_000,
        b'{"schema": 1' + b"0" * 6000 + b"}",
        b"\xff\xfe",
        b"{}" + b" " * (1 << 17),
    ],
)
def test_hostile_manifests_give_the_documented_error(tmp_path: Path, manifest: bytes) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    (path / "manifest.json").write_bytes(manifest)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "1"},
        {"schema": True},
        {"step": "1"},
        {"files": None},
        {"files": {}},
        {"files": {"../../etc/passwd": {"sha256": "", "size": 1}}},
        {"files": {"tensors.safetensors": 1, "info.json": 2}},
        {"files": {"tensors.safetensors": {}, "info.json": {}}},
    ],
)
def test_consistent_but_senseless_manifests(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    rewrite_manifest(path, **changes)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("info.json", b"[" * 200_000),
        ("info.json", b"[1]"),
        ("tensors.safetensors", b""),
        ("tensors.safetensors", b"\xff" * 8),
        ("tensors.safetensors", b"\x80\x04cos\nsystem\n."),
        ("tensors.safetensors", (2**40).to_bytes(8, "little")),
    ],
)
def test_hostile_content_with_right_hashes(tmp_path: Path, name: str, content: bytes) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    (path / name).write_bytes(content)
    files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    rewrite_manifest(path, files=files)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["tensors.safetensors", "info.json", "manifest.json"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


# -------------------- full disk, leftovers, living writer


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, call: int, code: int) -> list[int]:
    """Let the call-th call of os.`function` fail (a write: after half its bytes); the list counts the calls."""
    real, calls = getattr(os, function), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            if function == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, wrapped)
    return calls


@pytest.mark.parametrize("function", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_any_point_loses_nothing(tmp_path: Path, function: str, code: int) -> None:
    points = 0
    for call in range(1, 50):
        folder = tmp_path / str(call)
        for step in (1, 2):
            save_checkpoint(folder, state(step), {}, step=step)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = fail_at(monkeypatch, function, call, code)
            message = None
            try:
                save_checkpoint(folder, state(3), {"x": "y"}, step=3)
            except UserError as error:
                message = str(error)
        assert (message is not None) == (calls[0] >= call)
        if message is None:
            break
        points += 1
        needed = re.search(r"step-0000000003 .* ([\d,]+) bytes needed", message)
        assert needed
        assert 656 <= int(needed[1].replace(",", "")) < 3000
        assert not [name for name in names(folder) if name.startswith(".")]
        assert latest(folder).step in ({2, 3} if function == "fsync" else {2})
        assert holds(load_checkpoint(folder / "step-0000000001"), 1)
        save_checkpoint(folder, state(4), {}, step=4)  # after space was freed
        assert holds(latest(folder), 4)
    assert points >= {"write": 4, "fsync": 4, "mkdir": 1, "rename": 1}[function]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux to name an open file")
def test_all_is_on_disk_before_the_name_appears_and_the_name_before_anything_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, state(1), {}, step=1)
    happened: list[tuple[str, ...]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        happened.append(
            ("sync", re.sub(r"\.[0-9a-f]{12}\.", ".", os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), folder)))
        )
        fsync(fd)

    def note_rename(source: Path, target: Path) -> None:
        happened.append(("rename", source.name.split(".")[1] if source.name[0] == "." else source.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_checkpoint(folder, state(2), {}, step=2, keep=1)
    partial = ".step-0000000002.partial"
    assert happened == [
        ("sync", f"{partial}/tensors.safetensors"),
        ("sync", f"{partial}/info.json"),
        ("sync", f"{partial}/manifest.json"),
        ("sync", partial),
        ("rename", "step-0000000002"),
        ("sync", "."),
        ("rename", "step-0000000001"),
    ]


def test_other_disk_errors_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "write", 1, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save_checkpoint(tmp_path, state(1), {}, step=1)
    assert names(tmp_path) == []


def leave_stale(folder: Path) -> None:
    stale = folder / ".step-0000000009.abc.partial"
    stale.mkdir()
    (stale / "tensors.safetensors").write_bytes(b"half")


def test_leftovers_of_dead_writers_go_on_load_and_on_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)
    leave_stale(tmp_path)
    assert latest(tmp_path).step == 1
    assert names(tmp_path) == ["step-0000000001"]
    leave_stale(tmp_path)
    save_checkpoint(tmp_path, state(2), {}, step=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_a_living_writer_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)
    leave_stale(tmp_path)
    lock = FileLock(tmp_path / ".lock")
    assert lock.acquire()
    assert latest(tmp_path).step == 1
    assert ".step-0000000009.abc.partial" in names(tmp_path)
    monkeypatch.setattr(module, "_SAVE_WAIT_SECONDS", 0.1)
    with pytest.raises(UserError, match="another process has been saving"):
        save_checkpoint(tmp_path, state(2), {}, step=2)
    lock.release()
    save_checkpoint(tmp_path, state(2), {}, step=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_a_reader_meets_a_writer_that_replaces_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=5)
    real, once = module._read_manifest, []

    def replaced_meanwhile(at: Path) -> dict[str, Any]:
        manifest = real(at)
        if not once:
            once.append(True)
            save_checkpoint(tmp_path, state(2), {}, step=5)
        return manifest

    monkeypatch.setattr(module, "_read_manifest", replaced_meanwhile)
    assert holds(latest(tmp_path), 2)
    assert path.is_dir()


def test_an_unfinished_replacement_counts_even_where_nothing_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=5)
    shutil.copytree(path, kept := tmp_path / "kept")
    save_checkpoint(tmp_path, state(2), {}, step=5)
    path.rename(path.with_name(path.name + ".new"))
    kept.rename(path)

    def read_only(self: FileLock, wait_seconds: float = 0.0) -> bool:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as context:
        context.setattr(FileLock, "acquire", read_only)
        assert holds(latest(tmp_path), 2)
        assert names(tmp_path) == ["step-0000000005", "step-0000000005.new"]
    assert holds(latest(tmp_path), 2)
    assert names(tmp_path) == ["step-0000000005"]


# -------------------- sudden death

DEATHS = r"""
import os, random, shutil, signal, sys, time, torch
from pathlib import Path
from snclr.train.checkpoint import latest_checkpoint, save_checkpoint
torch.set_num_threads(1)
root, size = Path(sys.argv[1]), 200_000

def save(folder, version, step, size, keep=2):
    save_checkpoint(folder, {"w": torch.full((size,), float(version))}, {"version": version}, step=step, keep=keep)

def check(folder, versions, where):
    found = latest_checkpoint(folder, lambda text: sys.exit(f"{where}: warned {text}"))
    assert found is not None, where
    assert found.info["version"] in versions, (where, found.info)
    assert bool((found.tensors["w"] == found.info["version"]).all()), where
    left = [p.name for p in folder.iterdir() if p.name.startswith(".step") or p.name.endswith(".new")]
    assert not left, (where, left)
    return found.info["version"]

def die_at(call):
    # End the process at its call-th change of the disk, as a kill or a power cut would: nothing is cleaned up.
    count = [0]
    for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir"):
        def wrapped(*args, real=getattr(os, name), name=name, **kwargs):
            count[0] += 1
            if count[0] == call:
                if name == "write":
                    real(args[0], args[1][:len(args[1]) // 2])
                os._exit(9)
            return real(*args, **kwargs)
        setattr(os, name, wrapped)

def every_point(scenario, step, keep):
    outcomes = set()
    for version in (1, 2):
        save(root / scenario, version, version, 100)
    for call in range(1, 200):
        folder = root / f"{scenario}-{call}"
        shutil.copytree(root / scenario, folder)
        pid = os.fork()
        if pid == 0:
            die_at(call)
            save(folder, 3, step, 100, keep)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        outcomes.add(check(folder, {2, 3}, f"{scenario} at {call}"))
        shutil.rmtree(folder)
        if code == 0:
            break
    assert code == 0 and call > 15 and outcomes == {2, 3}, (scenario, code, call, outcomes)
    print(scenario, call - 1)

def random_kills(trials):
    folder, seen, random_ = root / "kills", set(), random.Random(0)
    save(folder, 1, 1, size)
    for trial in range(trials):
        first = check(folder, range(10**6), trial) + 1
        pid = os.fork()
        if pid == 0:
            for version in range(first, 10**6):
                save(folder, version, version // 2, size)  # every other one replaces a step that is there
            os._exit(0)
        time.sleep(0.003 + random_.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.add(check(folder, range(first - 1, 10**6), trial))
    assert len(seen) > 1, "no save was ever completed: the trial proves nothing"
    print("kills", trials)

every_point("new", 3, 2)
every_point("only", 3, 1)
every_point("replace", 2, 2)
random_kills(20)
"""


def test_death_at_every_point_and_at_random_moments_leaves_an_intact_newest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DEATHS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["new", "only", "replace", "kills"]
