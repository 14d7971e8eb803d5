"""A linear probe that is killed or interrupted in a process of its own ends as one that never was."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import snclr
from snclr.evaluate.results import read_results

tiny_run = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unit" / "tiny_run.py")))
SETTINGS: dict[str, Any] = {"protocol": "paper", "epochs": 150, "batch_size": 12, "lr": 3.0, "device": "cpu"}
# A state after every step, as a probe of hours has every two minutes.
PROGRAM = """
import sys
import snclr.evaluate.resume as resume
from snclr.cli import main
resume.SAVE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tiny_run.write_images(tmp_path_factory.mktemp("images"), each=8)
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def undisturbed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = shutil.copytree(trained, tmp_path_factory.mktemp("undisturbed") / "run")
    return snclr.linear(run, **SETTINGS, quiet=True)


def stop_in_the_middle(run: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the probe, send the signal once it has saved a few steps; its exit code and what it said."""
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
            _, said = process.communicate(timeout=600)
        finally:
            process.kill()  # a test that fails leaves nothing running
    return process.returncode, said


@pytest.mark.timeout(900)  # a busy machine may take minutes to start a process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_goes_on_to_the_same_result(
    trained: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    code, said = stop_in_the_middle(run, number)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 130, said
        assert "stopped by SIGINT: what was done is kept. Go on with the same command:\n  snclr linear " in said
    assert read_results(run) == []
    found = snclr.linear(run, **SETTINGS)
    assert "going on after step" in capsys.readouterr().err
    assert {**found, "time": None} == {**undisturbed, "time": None}
    assert sorted(path.name for path in (run / "evaluation").iterdir()) == ["features"]
