"""Checkpoints: round trip, damage, full disks, concurrent processes and kills at every point."""

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
from safetensors import SafetensorError

from snclr.checkpoint import format as module
from snclr.checkpoint.format import (
    Checkpoint,
    DamagedCheckpoint,
    UnknownSchema,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from snclr.errors import UserError
from snclr.io.locking import FileLock
from tests.reliability.damage import damage


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


# -------------------- round trip


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
        "complex": torch.randn(2, dtype=torch.complex64),
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


@settings(max_examples=15)
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
def test_any_mixture_of_tensors_round_trips(tmp_path_factory: pytest.TempPathFactory, layout: Any) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in layout.items()}
    loaded = load_checkpoint(save_checkpoint(tmp_path_factory.mktemp("c"), tensors, {}, step=0))
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensors[name]) for name in tensors)


def test_the_manifest_has_the_size_and_hash_of_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snclr.io.hashing._CHUNK", 777)
    path = save_checkpoint(tmp_path, {"a": torch.randn(3000), "b": torch.randn(1)}, {}, step=1)
    for name, entry in json.loads((path / "manifest.json").read_text())["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def test_all_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    (tmp_path / "plain").touch()
    assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:13]))
    assert holds(load_checkpoint(save_checkpoint(tmp_path, state(1), {}, step=1)), 1)


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


def test_values_that_cannot_be_saved_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="sparse"):
        save_checkpoint(tmp_path, {"x": torch.eye(2).to_sparse()}, {}, step=1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, {}, {"x": object()}, step=1)
    assert names(tmp_path) == []


# -------------------- keeping and pruning


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, state(step), {}, step=step, keep=2)
    assert names(tmp_path) == ["step-0000000030", "step-0000000040"]
    assert latest(tmp_path).step == 40


def test_saving_an_earlier_step_does_not_prune_a_damaged_later_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, state(step), {}, step=step)
    (tmp_path / "step-0000000030" / "info.json").unlink()
    save_checkpoint(tmp_path, state(25), {}, step=25, keep=1)
    assert names(tmp_path) == ["step-0000000025", "step-0000000030"]
    warnings: list[str] = []
    assert latest(tmp_path, warnings.append).step == 25
    assert len(warnings) == 1
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


def test_saving_succeeds_if_an_old_checkpoint_cannot_be_deleted(
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


def test_any_damage_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    for step in (1, 2):
        save_checkpoint(pristine, state(step), {"step": step, "seed": 12345}, step=step)
    random_ = random.Random(0)
    for trial in range(120):
        folder = tmp_path / str(trial)
        shutil.copytree(pristine, folder)
        newest = folder / "step-0000000002"
        what = damage(random_.choice(sorted(newest.iterdir())), random_)
        warnings: list[str] = []
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(newest)
        found = latest(folder, warnings.append)
        assert found.step == 1, what
        assert holds(found, 1), what
        assert len(warnings) == 1, what
        assert str(newest) in warnings[0]
        shutil.rmtree(folder)


def test_a_flipped_bit_anywhere_in_the_manifest_is_detected(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"w": torch.ones(1)}, {}, step=3)
    content = (path / "manifest.json").read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(path)


def test_the_error_describes_the_damage(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    size = (path / "tensors.safetensors").stat().st_size
    os.truncate(path / "tensors.safetensors", size - 1)
    with pytest.raises(DamagedCheckpoint, match=f"tensors.safetensors has {size - 1} bytes, but {size} were written"):
        load_checkpoint(path)
    (path / "tensors.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"No such file or directory: .*tensors\.safetensors"):
        load_checkpoint(path)


def test_a_warning_is_given_if_no_checkpoint_is_intact(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing", no_warning) is None
    for step in (1, 2):
        (save_checkpoint(tmp_path, state(step), {}, step=step) / "tensors.safetensors").unlink()
    warnings: list[str] = []
    assert latest_checkpoint(tmp_path, warnings.append) is None
    assert [
        "step-0000000002" in warnings[0],
        "step-0000000001" in warnings[1],
        "nothing to resume from" in warnings[2],
    ] == [True] * 3
    with pytest.raises(UserError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "step-0000000009")


@pytest.mark.parametrize("newer", [2, 999])
def test_an_unknown_schema_is_an_error_and_not_skipped(tmp_path: Path, newer: int) -> None:
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
def test_an_invalid_manifest_is_damage(tmp_path: Path, manifest: bytes) -> None:
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
def test_a_manifest_with_wrong_fields_is_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
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
def test_invalid_content_with_correct_hashes_is_damage(tmp_path: Path, name: str, content: bytes) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    (path / name).write_bytes(content)
    files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    rewrite_manifest(path, files=files)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["tensors.safetensors", "info.json", "manifest.json"])
def test_a_pipe_instead_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=1)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)


# -------------------- full disk, leftovers, concurrent processes


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, call: int, code: int) -> list[int]:
    """Make the call-th call of os.`function` fail (a write: after half its bytes); the list counts the calls."""
    real, calls = getattr(os, function), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if function == "mkdir" and not str(args[0]).endswith(".partial"):
            return real(*args, **kwargs)  # filelock checks that the folder of the lock exists, which may fail
        calls[0] += 1
        if calls[0] == call:
            if function == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, wrapped)
    return calls


def fail_in_save_file(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Make safetensors fail as it does on an error of the disk."""

    def save_file(tensors: Any, path: Path) -> None:
        (path.parent / ".tmp").write_bytes(b"half")
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)


def assert_a_full_disk_lost_nothing(folder: Path, error: str, newest: set[int]) -> None:
    needed = re.search(r"step-0000000003 .* ([\d,]+) bytes needed", error)
    assert needed
    assert 656 <= int(needed[1].replace(",", "")) < 3000
    assert not [name for name in names(folder) if name.startswith(".")]
    assert latest(folder).step in newest
    assert holds(load_checkpoint(folder / "step-0000000001"), 1)
    save_checkpoint(folder, state(4), {}, step=4)  # after space was freed
    assert holds(latest(folder), 4)


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
        assert_a_full_disk_lost_nothing(folder, message, {2, 3} if function == "fsync" else {2})
    assert points >= {"write": 2, "fsync": 4, "mkdir": 1, "rename": 1}[function]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_while_safetensors_writes_loses_nothing(tmp_path: Path, code: int) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), {}, step=step)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_in_save_file(monkeypatch, code)
        with pytest.raises(UserError) as caught:
            save_checkpoint(tmp_path, state(3), {}, step=3)
    assert_a_full_disk_lost_nothing(tmp_path, str(caught.value), {2})


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux to name an open file")
def test_files_are_synced_before_the_rename_and_old_checkpoints_deleted_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, state(1), {}, step=1)
    events: list[tuple[str, ...]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        events.append(
            ("sync", re.sub(r"\.[0-9a-f]{12}\.", ".", os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), folder)))
        )
        fsync(fd)

    def note_rename(source: Path, target: Path) -> None:
        events.append(("rename", source.name.split(".")[1] if source.name[0] == "." else source.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_checkpoint(folder, state(2), {}, step=2, keep=1)
    partial = ".step-0000000002.partial"
    assert events == [
        ("sync", f"{partial}/info.json"),
        ("sync", f"{partial}/tensors.safetensors"),
        ("sync", f"{partial}/manifest.json"),
        ("sync", partial),
        ("rename", "step-0000000002"),
        ("sync", "."),
        ("rename", "step-0000000001"),
    ]


@pytest.mark.parametrize("function", ["write", "save_file"])
def test_other_disk_errors_are_not_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    if function == "write":
        fail_at(monkeypatch, "write", 1, errno.EIO)
    else:
        fail_in_save_file(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save_checkpoint(tmp_path, state(1), {}, step=1)
    assert names(tmp_path) == []


def leave_stale(folder: Path) -> None:
    stale = folder / ".step-0000000009.abc.partial"
    stale.mkdir()
    (stale / "tensors.safetensors").write_bytes(b"half")


def test_the_next_save_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)
    leave_stale(tmp_path)
    assert latest(tmp_path).step == 1
    save_checkpoint(tmp_path, state(2), {}, step=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_a_second_writer_waits_for_the_first_and_leaves_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state(1), {}, step=1)
    leave_stale(tmp_path)
    lock = FileLock(tmp_path / ".lock")
    assert lock.acquire()
    assert latest(tmp_path).step == 1
    monkeypatch.setattr(module, "_LOCK_TIMEOUT", 0.1)
    with pytest.raises(UserError, match="has been writing to"):
        save_checkpoint(tmp_path, state(2), {}, step=2)
    assert ".step-0000000009.abc.partial" in names(tmp_path)
    lock.release()
    save_checkpoint(tmp_path, state(2), {}, step=2)
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_a_checkpoint_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_unfinished_replacement_is_the_newest_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), {}, step=5)
    shutil.copytree(path, kept := tmp_path / "kept")
    save_checkpoint(tmp_path, state(2), {}, step=5)
    path.rename(path.with_name(path.name + ".new"))
    kept.rename(path)
    assert holds(latest(tmp_path), 2)
    assert names(tmp_path) == ["step-0000000005", "step-0000000005.new"]  # reading changes nothing
    save_checkpoint(tmp_path, state(3), {}, step=6)
    assert names(tmp_path) == ["step-0000000005", "step-0000000006"]
    assert holds(load_checkpoint(path), 2)


# -------------------- kills

KILL_SCRIPT = r"""
import os, random, shutil, signal, sys, time, torch, safetensors.torch
from pathlib import Path
from snclr.checkpoint.format import latest_checkpoint, save_checkpoint
torch.set_num_threads(1)
root, size = Path(sys.argv[1]), 200_000

def save(folder, version, step, size, keep=2):
    save_checkpoint(folder, {"w": torch.full((size,), float(version))}, {"version": version}, step=step, keep=keep)

def check(folder, versions, where):
    found = latest_checkpoint(folder, lambda text: sys.exit(f"{where}: warned {text}"))
    assert found is not None, where
    assert found.info["version"] in versions, (where, found.info)
    assert bool((found.tensors["w"] == found.info["version"]).all()), where
    return found.info["version"]

def die_at(call):
    # End the process at its call-th change of the disk, as SIGKILL does: nothing is cleaned up.
    count = [0]
    def save_file(tensors, path, real=safetensors.torch.save_file):
        for half in (b"", b"half"):
            count[0] += 1
            if count[0] == call:
                (path.parent / ".tmp1").write_bytes(half)
                os._exit(9)
        real(tensors, path)
    safetensors.torch.save_file = save_file
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
        save(folder, 4, 4, 100, 1)
        left = [p.name for p in folder.iterdir() if p.name != ".lock"]
        assert left == ["step-0000000004"], (scenario, call, left)
        shutil.rmtree(folder)
        if code == 0:
            break
    assert code == 0 and call > 15 and outcomes == {2, 3}, (scenario, code, call, outcomes)
    print(scenario, call - 1)

def random_kills(trials):
    folder, seen, random_ = root / "kills", set(), random.Random(0)
    began = time.monotonic()
    save(folder, 1, 1, size)
    seconds = time.monotonic() - began
    for trial in range(trials):
        first = check(folder, range(10**6), trial) + 1
        pid = os.fork()
        if pid == 0:
            for version in range(first, 10**6):
                save(folder, version, version // 2, size)  # every other save replaces an existing step
            os._exit(0)
        time.sleep(random_.random() * 5 * seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.add(check(folder, range(first - 1, 10**6), trial))
    assert len(seen) > 1, "no save was ever completed: the test proves nothing"
    print("kills", trials)

every_point("new", 3, 2)
every_point("only", 3, 1)
every_point("replace", 2, 2)
random_kills(20)
"""


def test_a_kill_at_any_point_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILL_SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["new", "only", "replace", "kills"]
