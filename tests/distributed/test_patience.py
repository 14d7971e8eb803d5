"""Slow is not stuck: what one process does alone may take longer than the timeout; one that hangs is named."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.distributed.ranks import run
from tests.faults import harness

WORKER = str(Path(__file__).parent / "patience_worker.py")
TIMEOUT = 12
"""Less, and a busy machine alone would make a process look dead."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return harness.write_images(tmp_path_factory.mktemp("images"))


def pretrain(what, value, images, out, *more, cwd=None):
    settings = [f"--{name}={setting}" for name, setting in harness.SETTINGS.items() if name != "timeout"]
    flags = ["pretrain", f"--data={images}", f"--out={out}", f"--timeout={TIMEOUT}", "--workers=0", *settings, *more]
    return run(2, WORKER, what, str(value), *flags, cwd=cwd)


def read_losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_opening_the_images_may_take_longer_than_the_timeout(images, tmp_path):
    done = pretrain("slow", TIMEOUT + 5, images, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "encoder.safetensors").is_file()


def test_a_process_that_lives_but_is_stuck_is_named(images, tmp_path):
    done = pretrain("stuck", 5, images, tmp_path / "run")
    assert done.returncode != 0
    said = re.findall(
        r"^snclr: (process \d+) on \S+ \(pid \d+\) lives, but has not come to step (\d+)", done.stderr, re.M
    )
    assert said, done.stderr[-3000:]
    assert set(said) == {("process 1", "5")}


def test_a_process_that_is_killed_is_not_waited_for(images, tmp_path):
    """The other waits for it without a limit, since a checkpoint may take long: until it is not there any more."""
    done = pretrain("killed", 2, images, tmp_path / "run", "--timeout=600")
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert "snclr pretrain: process 0 is gone or cannot be reached" in done.stderr, done.stderr[-3000:]


def test_a_machine_that_does_not_see_the_run_resumes_with_the_others(images, tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    first = pretrain("apart", tmp_path / "there", images, "run", "--epochs=2", cwd=tmp_path / "here")
    assert first.returncode == 0, first.stderr[-3000:]
    out = tmp_path / "here" / "run"
    losses = read_losses(out)
    shutil.rmtree(max((out / "checkpoints").glob("step-*")))  # as if it had been stopped before that
    (out / "encoder.safetensors").unlink()
    again = run(
        2, WORKER, "apart", str(tmp_path / "there"), "pretrain", "--resume", "--out=run", cwd=tmp_path / "here"
    )  # fmt: skip
    assert again.returncode == 0, again.stderr[-3000:]
    assert (out / "encoder.safetensors").is_file()
    assert read_losses(out) == losses
    assert not list((tmp_path / "there").iterdir())


def meetings(what):
    done = run(3, str(Path(__file__).parent / "meeting_worker.py"), what)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_meetings_leave_nothing_behind():
    """An evaluation meets at every step: the launcher's store must not grow with them."""
    assert meetings("many") == ["98"] * 3 + ["99"] * 3


def test_the_dead_of_this_machine_are_not_waited_for():
    assert meetings("died") == ["left"]


def test_numbers_of_processes_mean_nothing_in_another_container():
    assert meetings("elsewhere") == ["waiting"]
