"""A killed or stopped linear probe continues with a bit-identical result."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import snclr
from snclr.evaluation.results import read_results
from tests.helpers import tiny_run
from tests.reliability.harness import Sandbox

SETTINGS: dict[str, Any] = {"protocol": "paper", "epochs": 150, "batch_size": 12, "lr": 3.0, "device": "cpu"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tiny_run.write_images(tmp_path_factory.mktemp("images"), each=8)
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def reference(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = shutil.copytree(trained, tmp_path_factory.mktemp("reference") / "run")
    return snclr.linear(run, **SETTINGS, quiet=True).to_dict()


def stop_in_the_middle(sandbox: Sandbox, run: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the probe, send the signal after a few saved steps; return its exit code and output."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = sandbox.snclr("linear", run, *flags, faults=[{"name": "save_every_step"}])
    while command.alive():
        steps = [int(path.name[5:15]) for path in run.glob("evaluation/linear-paper-*/probe/step-*")]
        if steps and max(steps) >= 5:
            command.send(number)
            break
        time.sleep(0.01)
    return command.wait(), command.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_continues_with_the_same_result(
    sandbox: Sandbox,
    trained: Path,
    reference: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    code, stderr = stop_in_the_middle(sandbox, run, number)
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
    assert {**result, "time": None} == {**reference, "time": None}
    assert sorted(path.name for path in (run / "evaluation").iterdir()) == ["baselines", "features"]
