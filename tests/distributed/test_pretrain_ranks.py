"""The command line on several processes: resume with another number, bad images, refusals, launchers."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from snclr.train.checkpoint import latest_checkpoint
from snclr.train.state import digest
from tests.distributed.ranks import run, snclr

TINY = (
    "pretrain", "--recipe", "demo", "--batch-size", 8, "--epochs", 3, "--image-size", 16, "--queue-length", 30,
    "--neighbors", 3, "--hidden", 16, "--dim", 8, "--workers", 0, "--optimizer", "sgd", "--lr", 0.1,
    "--warmup-epochs", 0, "--checkpoint-every", 4, "--log-every", 1, "--precision", 64,
)  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """40 small photos of two classes, five of them unreadable."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for index in range(40):
        path = folder / "ab"[index % 2] / f"{index:02}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((20, 20), Image.Resampling.BICUBIC).save(path)
        if index % 8 == 3:
            path.write_bytes(path.read_bytes()[:60])
    return folder


def state_of(out):
    found = latest_checkpoint(out / "checkpoints", lambda text: pytest.fail(text))
    assert found is not None
    return found


def pretrain(processes, photos, out, *more):
    return snclr(processes, *TINY, "--data", photos, "--out", out, "--max-bad-share", 0.5, *more)


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    pretrain(1, photos, out)
    return out


def stop_after(processes, photos, out, step):
    """Train with so many processes until `step` and stop there, in good order."""
    from pathlib import Path

    done = run(processes, str(Path(__file__).parent / "stop_worker.py"), str(step), *(str(a) for a in TINY),
               "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5", "--resume")  # fmt: skip
    assert state_of(out).step == step, done.stderr[-3000:]


def test_resume_with_another_number_of_processes(photos, alone, tmp_path):
    out = tmp_path / "run"
    stop_after(2, photos, out, 5)
    stop_after(1, photos, out, 10)
    pretrain(2, photos, out, "--resume")
    expected, found = state_of(alone), state_of(out)
    assert found.step == expected.step == 15
    assert found.info["skipped"] == expected.info["skipped"]
    assert len(found.info["skipped"]) == 5
    for name, value in expected.tensors.items():
        if value.is_floating_point():
            torch.testing.assert_close(found.tensors[name], value, rtol=1e-8, atol=1e-8, msg=name)
        else:  # ids, ages and counters of the queue: the same images in the same order
            assert torch.equal(found.tensors[name], value), name
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (alone, out)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == list(range(1, 16))
    for one, several in zip(*lines, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert several.keys() == one.keys()


def test_the_same_command_gives_the_same_run_and_bad_images_are_counted_over_all(photos, alone, tmp_path):
    for name in ("first", "second"):
        pretrain(2, photos, tmp_path / name)
    first, second = (state_of(tmp_path / name) for name in ("first", "second"))
    assert digest(first.tensors, first.step) == digest(second.tensors, second.step)
    assert (tmp_path / "first" / "skipped.jsonl").read_text() == (alone / "skipped.jsonl").read_text()


def test_an_indivisible_batch_is_refused_with_the_nearest_that_works(photos, tmp_path):
    out = tmp_path / "run"
    done = run(
        1,
        "-m",
        "snclr",
        *map(str, TINY),
        "--batch-size",
        "7",
        "--devices",
        "2",
        "--data",
        str(photos),
        "--out",
        str(out),
    )
    assert done.returncode == 2
    assert "batch_size 7 cannot be shared equally by 2 processes; the nearest that can is 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_too_many_bad_images_stop_every_process(photos, tmp_path):
    done = run(
        2, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(tmp_path / "r"), "--max-bad-share", "0.1"
    )
    assert done.returncode != 0
    assert "cannot be used; a share of at most 0.1 is allowed" in done.stderr


def test_devices_starts_the_other_processes_itself(photos, alone, tmp_path):
    pretrain(1, photos, tmp_path / "run", "--devices", 2)
    expected, found = state_of(alone), state_of(tmp_path / "run")
    assert torch.equal(found.tensors["method/criterion.queue.ids"], expected.tensors["method/criterion.queue.ids"])


def test_slurm_tasks_become_the_processes(photos, alone, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(tmp_path / "run"),
               "--max-bad-share", "0.5"]  # fmt: skip
    common = os.environ | {
        "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    tasks = [
        subprocess.Popen(command, env=common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    errors = [task.communicate(timeout=240)[1].decode() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    expected, found = state_of(alone), state_of(tmp_path / "run")
    assert torch.equal(found.tensors["method/criterion.queue.ids"], expected.tensors["method/criterion.queue.ids"])
