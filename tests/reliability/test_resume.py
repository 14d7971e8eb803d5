"""Stopping a run and going on with it, as a person does: a real process, the printed command, refused folders."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reliability.fork_server import ENVIRONMENT, ROOT
from tests.reliability.harness import HANG_SECONDS, SETTINGS, Sandbox, assert_same_result, last_step


@pytest.mark.slow
def test_a_stopped_process_goes_on_by_the_command_it_printed(sandbox: Sandbox) -> None:
    out = sandbox.new_path()
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "snclr", "pretrain", f"--data={sandbox.images}", f"--out={out}", "--workers=1"]
    process = subprocess.Popen(
        [*command, *settings], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT, start_new_session=True
    )
    deadline = time.monotonic() + HANG_SECONDS
    while last_step(out) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: to the loader's worker too
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143, said
    printed = f"snclr pretrain --resume --out {out}"
    assert printed in said
    done = subprocess.run(
        [sys.executable, "-m", *printed.split()], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_same_result(out, sandbox.reference_run())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, -signal.SIGTERM), (signal.SIGINT, 130)],  # a shell says 143
)
def test_a_stop_before_the_images_are_there_has_the_code_of_a_stop(
    sandbox: Sandbox, number: signal.Signals, code: int
) -> None:
    with socket.socket() as nobody:  # bound, so that no other takes the port, and not listening
        nobody.bind(("127.0.0.1", 0))
        run = sandbox.pretrain(out := sandbox.new_path(), f"--data=http://127.0.0.1:{nobody.getsockname()[1]}/0.tar")
        deadline = time.monotonic() + HANG_SECONDS
        while "retrying for" not in run.output and run.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send(number)
        assert "Traceback" not in run.expect_exit(code)
    assert not out.exists()


def test_a_finished_or_foreign_folder_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    finished = shutil.copytree(sandbox.reference_run(), sandbox.new_path())
    said = sandbox.pretrain(finished).expect_exit(2)
    assert "--resume" in said
    assert "--overwrite" in said
    assert "lr=0.1" in sandbox.pretrain(finished, "--resume", "--lr=0.5").expect_exit(2)
    (tmp_path / "precious.txt").write_text("mine")
    said = sandbox.pretrain(tmp_path, "--overwrite").expect_exit(2)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert "Traceback" not in said
    assert_same_result(finished, sandbox.reference_run())
