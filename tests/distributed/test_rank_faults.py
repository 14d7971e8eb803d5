"""Slow, hung and dead ranks: opening a dataset may exceed the timeout; a rank that hangs or dies is named."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.distributed.launcher import run
from tests.reliability import harness

WORKER = str(Path(__file__).parent / "fault_worker.py")
TIMEOUT = 12
"""A shorter one could expire on a busy machine."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return harness.write_images(tmp_path_factory.mktemp("images"))


def pretrain(what, value, images, out, *, cwd=None, **settings):
    flags = harness.setting_flags(**{"data": images, "out": out, "timeout": TIMEOUT, "workers": 0, **settings})
    return run(2, WORKER, what, str(value), "pretrain", *flags, cwd=cwd)


def read_losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_opening_the_dataset_may_take_longer_than_the_timeout(images, tmp_path):
    done = pretrain("slow", TIMEOUT + 5, images, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "encoder.safetensors").is_file()


def test_a_rank_without_a_batch_is_named(images, tmp_path):
    done = pretrain("stuck", 5, images, tmp_path / "run")
    assert done.returncode != 0
    assert "snclr pretrain: rank 0 lost the connection" in done.stderr, done.stderr[-3000:]
    assert re.findall(r"Ranks that do not respond: (.*?)\.", done.stderr) == ["1"], done.stderr[-3000:]


def test_a_killed_rank_ends_the_job_before_the_timeout(images, tmp_path):
    done = pretrain("killed", 2, images, tmp_path / "run", timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert "Ranks that do not respond: 0." in done.stderr, done.stderr[-3000:]


def test_a_node_without_the_run_directory_resumes_with_the_others(images, tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    first = pretrain("chdir", tmp_path / "there", images, "run", epochs=2, cwd=tmp_path / "here")
    assert first.returncode == 0, first.stderr[-3000:]
    out = tmp_path / "here" / "run"
    losses = read_losses(out)
    shutil.rmtree(max((out / "checkpoints").glob("step-*")))  # as if it had been stopped before that
    (out / "encoder.safetensors").unlink()
    again = run(
        2, WORKER, "chdir", str(tmp_path / "there"), "pretrain", "--resume", "--out=run", cwd=tmp_path / "here"
    )  # fmt: skip
    assert again.returncode == 0, again.stderr[-3000:]
    assert (out / "encoder.safetensors").is_file()
    assert read_losses(out) == losses
    assert not list((tmp_path / "there").iterdir())


def long_barrier(*arguments):
    """Run the worker on three ranks and return what they printed, in rank order."""
    done = run(3, str(Path(__file__).parent / "long_barrier_worker.py"), *arguments)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_a_long_barrier_waits_longer_than_the_timeout():
    lines = long_barrier("late")
    assert len(lines) == 3
    assert all("done after" in line for line in lines), lines


def test_a_long_barrier_fails_at_once_when_a_rank_dies():
    lines = long_barrier("dead")
    assert len(lines) == 2
    assert all("Ranks that do not respond: 2." in line for line in lines), lines


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_every_rank_names_the_rank_that_does_not_reach_a_collective(missing):
    lines = long_barrier("stopped", str(missing))
    assert len(lines) == 2
    assert all(f"Ranks that do not respond: {missing}." in line for line in lines), lines


def test_an_ordinary_error_of_one_rank_is_not_blamed_on_the_others():
    lines = long_barrier("bug")
    assert lines[2] == "rank 2 raised mat1 and mat2 shapes cannot be multiplied"
