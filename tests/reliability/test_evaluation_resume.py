"""A killed or stopped linear probe continues with a bit-identical result."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import snclr
from snclr.evaluation.results import read_results
from tests.helpers import tiny_run

SETTINGS: dict[str, Any] = {"protocol": "paper", "epochs": 150, "batch_size": 12, "lr": 3.0, "device": "cpu"}
# Save after every step instead of every two minutes.
PROGRAM = """
import sys
import snclr.train.trainer as trainer
from snclr.cli.main import main
trainer.SAVE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tiny_run.write_images(tmp_path_factory.mktemp("images"), each=8)
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def undisturbed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = shutil.copytree(trained, tmp_path_factory.mktemp("undisturbed") / "run")
    return snclr.linear(run, **SETTINGS, quiet=True).to_dict()


def stop_in_the_middle(run: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the probe, send the signal after a few saved steps; return its exit code and stderr."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "linear", str(run), *flags], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            while process.poll() is None:
                steps = [int(path.name[5:15]) for path in run.glob("evaluation/linear-paper-*/probe/step-*")]
                if steps and max(steps) >= 5:
                    process.send_signal(number)
                    break
                time.sleep(0.01)
            _, stderr = process.communicate(timeout=600)
        finally:
            process.kill()  # a test that fails leaves nothing running
    return process.returncode, stderr


@pytest.mark.timeout(900)  # a busy machine may take minutes to start a process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_continues_with_the_same_result(
    trained: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    code, stderr = stop_in_the_middle(run, number)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 130, stderr
        assert re.search(
            r"stopped by SIGINT after step \d+ of \d+; everything is saved. Continue with:\n  snclr linear ", stderr
        )
    assert read_results(run) == []
    result = snclr.linear(run, **SETTINGS).to_dict()
    assert "resuming after step" in capsys.readouterr().err
    assert {**result, "time": None} == {**undisturbed, "time": None}
    assert sorted(path.name for path in (run / "evaluation").iterdir()) == ["baselines", "features"]
