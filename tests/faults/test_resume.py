"""A run that is killed or stopped, at any moment, ends exactly as one that never was: every tensor, every metric."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from snclr.train.checkpoint import latest_checkpoint
from snclr.train.metrics import read_metrics
from snclr.train.state import digest

SETTINGS = {
    "encoder": "resnet10-tiny", "stem": "half", "image-size": 16, "batch-size": 16, "epochs": 6, "warmup-epochs": 1,
    "hidden": 32, "dim": 16, "neighbors": 4, "queue-length": 40, "views": "cifar", "log-every": 1,
    "checkpoint-every": 3, "lr": 0.1, "accelerator": "cpu",
}  # fmt: skip
STEPS = 6 * 4


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for i in range(70):  # four batches and a rest that is dropped
        pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        (folder / f"class{i % 2}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"class{i % 2}" / f"{i}.png")
    (folder / "class0" / "broken.png").write_bytes(b"not an image")
    return folder


def start(images: Path, out: Path, *flags: str, workers: int = 1) -> subprocess.Popen[str]:
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "snclr", "pretrain", f"--data={images}", f"--out={out}", f"--workers={workers}"]
    return subprocess.Popen(
        [*command, *settings, *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # its own group: a signal to the group reaches the workers and nobody else
    )


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    while process.poll() is None:
        lines = read_metrics(out) if (out / "metrics.jsonl").is_file() else []
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return err


def end_state(out: Path) -> tuple[dict[str, torch.Tensor], list[dict], str]:
    checkpoint = latest_checkpoint(out / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    metrics = [{k: v for k, v in line.items() if k != "timing"} for line in read_metrics(out)]
    return checkpoint.tensors, metrics, digest(checkpoint.tensors, checkpoint.step)


def assert_same_end(out: Path, undisturbed: Path) -> None:
    tensors, metrics, total = end_state(out)
    expected, expected_metrics, expected_total = end_state(undisturbed)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
    assert total == expected_total
    assert metrics == expected_metrics
    for name in ("encoder.safetensors", "skipped.jsonl"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes(), name


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    finish(start(images, out))
    assert [json.loads(line)["key"] for line in (out / "skipped.jsonl").read_text().splitlines()] == [
        "class0/broken.png"
    ]
    assert [line["step"] for line in read_metrics(out)] == list(range(1, STEPS + 1))
    return out


@pytest.mark.slow
def test_killed_at_random_points(images, undisturbed, tmp_path):
    out = tmp_path / "run"
    chance = random.Random(os.environ.get("SNCLR_TEST_SEED", "1"))
    kills = 0
    for after in (2, 8, 15):
        process = start(images, out, *(["--resume"] if kills else []))
        wait_for_step(process, out, after + chance.randrange(4))
        time.sleep(chance.random() * 0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        kills += process.returncode == -signal.SIGKILL
    assert kills == 3
    finish(start(images, out, "--resume"))
    assert_same_end(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_saves_says_how_to_go_on_and_changes_nothing(images, undisturbed, tmp_path, number, code):
    out = tmp_path / "run"
    process = start(images, out)
    wait_for_step(process, out, 5)
    os.killpg(process.pid, number)  # as a terminal or a scheduler does: to the loader's workers too
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"snclr pretrain --resume --out {out}" in err
    checkpoint = latest_checkpoint(out / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    assert 5 <= checkpoint.step < STEPS
    assert checkpoint.step == read_metrics(out)[-1]["step"]  # the step it stopped at, not the last interval
    resumed = subprocess.run(  # the very command that was printed, with another number of workers
        [sys.executable, "-m", "snclr", "pretrain", "--resume", "--out", str(out), "--workers", "0"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(out, undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_loudly(images, undisturbed, tmp_path):
    out = tmp_path / "run"
    process = start(images, out)
    wait_for_step(process, out, 8)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    newest = sorted((out / "checkpoints").glob("step-*"))[-1] / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    err = finish(start(images, out, "--resume"))
    assert "warning" in err
    assert newest.parent.name in err
    assert_same_end(out, undisturbed)


def test_a_finished_or_foreign_folder_is_refused(images, undisturbed, tmp_path):
    process = start(images, undisturbed)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--resume" in err
    assert "--overwrite" in err
    changed = start(images, undisturbed, "--resume", "--lr=0.5")
    _, err = changed.communicate(timeout=60)
    assert changed.returncode == 2
    assert "lr=0.1" in err
    (tmp_path / "precious.txt").write_text("mine")
    foreign = start(images, tmp_path, "--overwrite")
    _, err = foreign.communicate(timeout=60)
    assert foreign.returncode == 2
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert "Traceback" not in err
