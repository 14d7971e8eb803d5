"""A stop before training has started, and run directories that are refused."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.reliability.harness import HANG_SECONDS, Sandbox, assert_same_result


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, -signal.SIGTERM), (signal.SIGINT, 130)],  # 143 in a shell
)
def test_a_stop_while_the_images_are_opened_has_the_exit_code_of_a_stop(
    sandbox: Sandbox, number: signal.Signals, code: int
) -> None:
    with socket.socket() as server:  # bound but not listening
        server.bind(("127.0.0.1", 0))
        run = sandbox.pretrain(out := sandbox.new_path(), f"--data=http://127.0.0.1:{server.getsockname()[1]}/0.tar")
        deadline = time.monotonic() + HANG_SECONDS
        while "retrying for" not in run.output and run.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send(number)
        assert "Traceback" not in run.expect_exit(code)
    assert not out.exists()


def test_a_finished_or_foreign_folder_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    finished = shutil.copytree(sandbox.reference_run(), sandbox.new_path())
    printed = sandbox.pretrain(finished).expect_exit(2)
    assert "--resume" in printed
    assert "--overwrite" in printed
    assert "--lr 0.1" in sandbox.pretrain(finished, "--resume", "--lr=0.5").expect_exit(2)
    (tmp_path / "precious.txt").write_text("mine")
    printed = sandbox.pretrain(tmp_path, "--overwrite").expect_exit(2)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert "Traceback" not in printed
    assert_same_result(finished, sandbox.reference_run())
