"""Run directories: locked by one run, and only files of the run are deleted."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from snclr.checkpoint.encoder_file import save_snapshot, snapshots
from snclr.checkpoint.run_dir import LOCK, RunDir, open_run
from snclr.errors import UserError
from snclr.io.locking import FileLock

FOLDERS = ("checkpoints", "tensorboard", "figures")


def output_paths(run: RunDir) -> dict[str, Path]:
    return {name: path for name, path in vars(run).items() if isinstance(path, Path) and name != "path"}


def fill(run: RunDir) -> None:
    """Write every file and folder of a run."""
    for path in [*output_paths(run).values(), run.path / "finetune-1", run.path / "detect-2"]:
        if path.name in FOLDERS:
            path.mkdir()
            (path / "inside").write_text("x")
        else:
            path.write_text("x")


def finished_run(path: Path) -> Path:
    with RunDir.create(path) as run:
        fill(run)
    return path


def contents(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*")} - {LOCK}


def test_names() -> None:
    assert {name: path.name for name, path in output_paths(RunDir("r")).items()} == {
        "config": "config.yaml",
        "checkpoints": "checkpoints",
        "encoders": "encoders",
        "encoder_weights": "encoder.safetensors",
        "encoder_config": "config.json",
        "metrics": "metrics.jsonl",
        "tensorboard": "tensorboard",
        "log": "train.log",
        "sessions": "sessions.jsonl",
        "skipped": "skipped.jsonl",
        "results": "results.jsonl",
        "figures": "figures",
        "report": "report.html",
        "explore": "explore",
        "runs_report": "report-runs.html",
        "export": "export",
        "nonfinite": "nonfinite.json",
        "evaluation": "evaluation",
    }
    assert not Path("r").exists()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_missing_or_empty_directory_is_accepted(tmp_path: Path, options: dict[str, bool]) -> None:
    with RunDir.create(tmp_path / "a" / "b", **options) as run:
        assert run.path.is_dir()
    # A run that was killed before it wrote anything leaves only its lock.
    with RunDir.create(tmp_path / "a" / "b", **options):
        pass


def test_a_finished_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    before = contents(path)
    with pytest.raises(UserError, match=r"already contains a run.*--resume.*--overwrite"):
        RunDir.create(path)
    with RunDir.create(path, resume=True):
        assert contents(path) == before
    (path / "my notes.txt").write_text("mine")
    with RunDir.create(path, overwrite=True):
        assert contents(path) == {"my notes.txt"}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("inside", ["photos/cat.jpg", "config.yaml", "metrics.jsonl", "checkpoints/x"])
def test_a_directory_that_is_not_a_run_is_not_changed(tmp_path: Path, options: dict[str, bool], inside: str) -> None:
    (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / inside).write_text("mine")
    before = {str(p) for p in tmp_path.rglob("*")}
    with pytest.raises(UserError, match="not a run of snclr"):
        RunDir.create(tmp_path, **options)
    assert {str(p) for p in tmp_path.rglob("*")} == before


def test_a_copy_without_hidden_files_can_be_resumed(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    (path / LOCK).unlink()
    with RunDir.create(path, resume=True):
        pass
    assert open_run(path).config.is_file()


def test_overwriting_removes_links_but_not_their_targets(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    with RunDir.create(tmp_path / "run") as run:
        run.checkpoints.symlink_to(elsewhere)
        run.log.symlink_to(elsewhere / "missing")
    with RunDir.create(tmp_path / "run", overwrite=True):
        assert contents(tmp_path / "run") == set()
    assert (elsewhere / "precious").read_text() == "x"


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run")
    (path / ".config.yaml.0123.partial").write_text("ha")
    (path / ".checkpoints.0123.partial").mkdir()
    (path / ".checkpoints.0123.partial" / "x").write_text("x")
    (path / "encoders").unlink()
    for folder in ("tensorboard", "encoders"):
        (path / folder).mkdir(exist_ok=True)
        (path / folder / ".file.0123.partial").write_text("x")
    before = {name for name in contents(path) if "partial" not in name}
    with RunDir.create(path, resume=True):
        assert contents(path) == before


def test_a_file_or_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "file")
    with pytest.raises(UserError, match="cannot write"):
        RunDir.create(tmp_path / "file" / "below")


def test_a_second_run_in_this_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=f"running job: process {os.getpid()} on {socket.gethostname()!r}"):
            RunDir.create(tmp_path / "run", **options)
    run.close()
    run.close()
    RunDir.create(tmp_path / "run").close()


HOLD = """
import os, sys, time
from snclr.checkpoint.run_dir import RunDir
run = RunDir.create(sys.argv[1], resume=True)
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
print(worker, flush=True)
time.sleep(600)
"""


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"running job: process {holder.pid} on"):
                RunDir.create(tmp_path / "run", resume=True)
            holder.kill()
            holder.wait()
            # The worker releases the lock after the fork, which may be late on a busy machine.
            assert FileLock(tmp_path / "run" / LOCK).acquire(timeout=200)
            os.kill(worker, 0)  # raises if the worker is dead
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunDir.create(tmp_path / "run") as run:
        assert run.path.is_dir()
    assert "a second writer will not be detected" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00" * 50, "[" * 900])
def test_an_unreadable_lock_file_names_no_process(tmp_path: Path, content: str) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.lock.path.write_text(content)
        with pytest.raises(UserError, match="running job: another process"):
            RunDir.create(tmp_path / "run", resume=True)


def test_opening_for_reading(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    fill(run)
    assert open_run(str(tmp_path / "run")).metrics.read_text() == "x"  # while the run is active
    run.close()
    (tmp_path / "encoder only").mkdir()
    for name in ("encoder.safetensors", "config.json"):
        (tmp_path / "encoder only" / name).write_text("x")
    open_run(tmp_path / "encoder only")
    with pytest.raises(UserError, match="there is no run directory"):
        open_run(tmp_path / "missing")
    with pytest.raises(UserError, match=r"is a file of a run. Give the run directory: .*run$"):
        open_run(run.metrics)
    (tmp_path / "cat.jpg").write_text("x")
    with pytest.raises(UserError, match=r"cat.jpg is a file, not a run directory\. Give"):
        open_run(tmp_path / "cat.jpg")
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="is not a run"):
        open_run(tmp_path / "photos")


def test_snapshots_are_spread_evenly_and_do_not_depend_on_a_resume(tmp_path):
    run = RunDir(tmp_path)
    encoder = torch.nn.Linear(2, 2)
    for step in (3, 6, 9, 6, 9, 12, 15, 18, 20):  # saved every 3 steps, resumed from step 3
        save_snapshot(run, encoder, step, total_steps=20, keep=4)
    assert list(snapshots(run)) == [6, 12, 15, 20]
    assert torch.equal(load_file(snapshots(run)[6])["weight"], encoder.weight)


def test_without_keep_encoders_no_snapshot_is_written(tmp_path):
    save_snapshot(RunDir(tmp_path), torch.nn.Linear(2, 2), 5, total_steps=5, keep=0)
    assert snapshots(RunDir(tmp_path)) == {}
