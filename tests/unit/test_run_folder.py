"""A run folder belongs to one living run, and nothing of anyone else's is ever deleted."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snclr import durable
from snclr.errors import UserError
from snclr.train.run_folder import CONTENTS, LOCK, RunFolder, open_run, write_atomic


def fill(run: RunFolder) -> None:
    """Every file and folder a run writes."""
    for name in CONTENTS:
        if name in ("checkpoints", "tensorboard", "figures"):
            (run.path / name).mkdir()
            (run.path / name / "inside").write_text("x")
        else:
            (run.path / name).write_text("x")


def finished_run(path: Path) -> Path:
    with RunFolder.create(path) as run:
        fill(run)
    return path


def contents(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*")} - {LOCK}


def test_names() -> None:
    run = RunFolder("r")
    found = {name: value.name for name, value in vars(run).items() if isinstance(value, Path) and name != "path"}
    assert found == {
        "config": "config.yaml",
        "checkpoints": "checkpoints",
        "encoder_weights": "encoder.safetensors",
        "encoder_config": "config.json",
        "metrics": "metrics.jsonl",
        "tensorboard": "tensorboard",
        "log": "train.log",
        "skipped": "skipped.jsonl",
        "results": "results.jsonl",
        "figures": "figures",
        "report": "report.html",
        "export": "export",
        "nonfinite": "nonfinite.json",
        "evaluation": "evaluation",
    }
    assert set(found.values()) == set(CONTENTS)
    assert not Path("r").exists()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_missing_or_empty_folder_is_always_fine(tmp_path: Path, options: dict[str, bool]) -> None:
    with RunFolder.create(tmp_path / "a" / "b", **options) as run:
        assert run.path.is_dir()
    # Killed before it wrote anything: only its lock is there, which is no reason to refuse.
    with RunFolder.create(tmp_path / "a" / "b", **options):
        pass


def test_a_finished_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = contents(path)
    with pytest.raises(UserError, match=r"already holds a run.*--resume.*--overwrite"):
        RunFolder.create(path)
    with RunFolder.create(path, resume=True):
        assert contents(path) == before
    (path / "my notes.txt").write_text("mine")
    with RunFolder.create(path, overwrite=True):
        assert contents(path) == {"my notes.txt"}
    with pytest.raises(UserError, match="both given"):
        RunFolder.create(path, resume=True, overwrite=True)


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("inside", ["photos/cat.jpg", "config.yaml", "metrics.jsonl", "checkpoints/x"])
def test_a_foreign_folder_is_never_touched(tmp_path: Path, options: dict[str, bool], inside: str) -> None:
    (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / inside).write_text("mine")
    before = {str(p) for p in tmp_path.rglob("*")}
    with pytest.raises(UserError, match="not a run of snclr"):
        RunFolder.create(tmp_path, **options)
    assert {str(p) for p in tmp_path.rglob("*")} == before


def test_a_copy_without_hidden_files_can_be_resumed(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    (path / LOCK).unlink()
    with RunFolder.create(path, resume=True):
        pass
    assert open_run(path).config.is_file()


def test_overwriting_removes_links_and_not_what_they_point_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    with RunFolder.create(tmp_path / "run") as run:
        run.checkpoints.symlink_to(elsewhere)
        run.log.symlink_to(elsewhere / "missing")
    with RunFolder.create(tmp_path / "run", overwrite=True):
        assert contents(tmp_path / "run") == set()
    assert (elsewhere / "precious").read_text() == "x"


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    (path / ".config.yaml.0123.partial").write_text("ha")
    (path / ".checkpoints.0123.partial").mkdir()
    (path / ".checkpoints.0123.partial" / "x").write_text("x")
    before = {name for name in contents(path) if "partial" not in name}
    with RunFolder.create(path, resume=True):
        assert contents(path) == before


def test_a_file_or_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(UserError, match="cannot write"):
        RunFolder.create(tmp_path / "file" / "below")


def test_a_second_run_in_this_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=f"still alive: process {os.getpid()} on {socket.gethostname()!r}"):
            RunFolder.create(tmp_path / "run", **options)
    run.close()
    run.close()
    RunFolder.create(tmp_path / "run").close()


HOLD = """
import os, sys, time
from snclr.train.run_folder import RunFolder
run = RunFolder.create(sys.argv[1], resume=True)
worker = os.fork()
if worker == 0:
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
time.sleep(60)
"""


def test_the_lock_dies_with_its_process_even_where_a_forked_worker_lives_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"still alive: process {holder.pid} on"):
                RunFolder.create(tmp_path / "run", resume=True)
            holder.kill()
            holder.wait()
            # A worker lets go of the lock in its first moments, which on a busy machine may be late.
            RunFolder.create(tmp_path / "run", resume=True, wait_seconds=20).close()
            os.kill(worker, 0)  # the worker was alive all the while, or this raises
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_waiting_for_a_run_that_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder.create(tmp_path / "run")
    monkeypatch.setattr(durable.time, "sleep", lambda seconds: first.close())
    RunFolder.create(tmp_path / "run", resume=True, wait_seconds=60).close()


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    with RunFolder.create(tmp_path / "run") as run:
        assert not run.lock.held
    assert "a second writer would go unnoticed" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00" * 50, "[" * 900])
def test_a_strange_lock_file_still_gives_a_message(tmp_path: Path, content: str) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        run.lock.path.write_text(content)
        with pytest.raises(UserError, match="still alive: another process"):
            RunFolder.create(tmp_path / "run", resume=True)


def test_opening_for_reading(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    fill(run)
    assert open_run(str(tmp_path / "run")).metrics.read_text() == "x"  # while it is alive
    run.close()
    (tmp_path / "encoder only").mkdir()
    for name in ("encoder.safetensors", "config.json"):
        (tmp_path / "encoder only" / name).write_text("x")
    open_run(tmp_path / "encoder only")
    with pytest.raises(UserError, match="there is no run folder"):
        open_run(tmp_path / "missing")
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="is not a run"):
        open_run(tmp_path / "photos")


# -------------------- write_atomic


@pytest.mark.parametrize("content", ["grüße\n", b"\x00\xff", ""])
def test_write_atomic(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "a"
    write_atomic(path, "before")
    write_atomic(str(path), content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask  # readable by whom the user's mask allows


@pytest.mark.parametrize("function", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, UserError), (errno.EIO, OSError)])
def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, kind: type[Exception]
) -> None:
    write_atomic(tmp_path / "a", "before")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as context:
        context.setattr(os, function, fail)
        with pytest.raises(kind) as caught:
            write_atomic(tmp_path / "a", "x" * 1234)
    assert (tmp_path / "a").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    if kind is UserError:
        assert str(tmp_path / "a") in str(caught.value)
        assert "1,234 bytes needed" in str(caught.value)
