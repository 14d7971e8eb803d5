"""The command line on several processes: resume with another number, bad images, refusals, launchers."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from snclr.checkpoint.format import latest_checkpoint
from tests.distributed.launcher import HANG_SECONDS, run, run_processes, snclr, torchrun
from tests.helpers.state_digest import digest

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


def test_two_processes_give_the_same_run_however_they_are_started_and_count_bad_images_together(
    photos, alone, tmp_path
):
    command = ("-m", "snclr", *map(str, TINY), "--data", str(photos), "--max-bad-share", "0.5", "--out")
    ways = {"torchrun": torchrun(2, *command, str(tmp_path / "torchrun"))}
    ways["devices"] = run(1, *command, str(tmp_path / "devices"), "--devices", "2")
    ways["variables"] = run(2, *command, str(tmp_path / "variables"))
    digests = set()
    for name, done in ways.items():
        assert done.returncode == 0, done.stderr[-3000:]
        assert "2 ranks" in done.stderr, name
        end = state_of(tmp_path / name)
        digests.add(digest(end.tensors, end.step))
        assert (tmp_path / name / "skipped.jsonl").read_text() == (alone / "skipped.jsonl").read_text()
        assert_same_images(alone, tmp_path / name)
    assert len(digests) == 1


def test_an_indivisible_batch_is_refused_with_the_nearest_that_works(photos, tmp_path):
    out = tmp_path / "run"
    done = run(
        2, "-m", "snclr", "pretrain", "--recipe", "demo", "--batch-size", "7", "--data", str(photos), "--out", str(out)
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert "--batch-size 7 is not divisible by 2 ranks; the nearest that is: 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_too_many_bad_images_stop_every_process(photos, tmp_path):
    done = run(
        2, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(tmp_path / "r"), "--max-bad-share", "0.1"
    )
    assert done.returncode != 0
    assert "are bad; a share of at most 0.1 is allowed" in done.stderr


def assert_same_images(alone, out):
    """The queue holds the same images in the same order, so every step had the same batch."""
    expected, found = state_of(alone), state_of(out)
    assert found.step == expected.step
    assert torch.equal(found.tensors["method/criterion.queue.ids"], expected.tensors["method/criterion.queue.ids"])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def side_by_side(photos, out, variables, *more):
    """Run the command once for each set of variables, all at once, as several machines or srun would start it."""
    done = run_processes(
        variables, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5",
        *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_a_batch_script_without_srun_starts_the_other_processes_too(photos, alone, tmp_path):
    """SLURM has allotted tasks, but nobody started them: its variables are no launcher."""
    allotted = {
        "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_NODELIST": "nowhere",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    }  # fmt: skip
    said = side_by_side(photos, tmp_path / "run", [allotted], "--devices", "2")
    assert "2 ranks" in said
    assert "SLURM allocated 8 tasks, but only 2 will run" in said
    assert_same_images(alone, tmp_path / "run")


def test_slurm_tasks_become_the_processes(photos, alone, tmp_path):
    """Two tasks a node, by `srun -N 2 -n 4` without --ntasks-per-node."""
    nodes, tasks = 2, 4
    common = {
        "SLURM_JOB_ID": "77", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes), "SLURM_NODELIST": "localhost",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{nodes})", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    each = [
        {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
        for rank in range(tasks)
    ]
    said = side_by_side(photos, tmp_path / "run", each)
    assert f"{tasks} ranks" in said
    assert_same_images(alone, tmp_path / "run")


def test_two_machines_meet_by_three_variables(photos, alone, tmp_path):
    """Both on this one: what differs between them is NODE_RANK."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    each = [{**meet, "NODE_RANK": str(rank)} for rank in range(2)]
    said = side_by_side(photos, tmp_path / "run", each, "--nodes", "2", "--devices", "1")
    assert "2 ranks" in said
    assert said.count(f"connecting 2 nodes at 127.0.0.1:{meet['MASTER_PORT']}") == 2
    assert_same_images(alone, tmp_path / "run")


def disturbed(photos, tmp_path, whom, number):
    """`--devices 2` with a signal after step 5, to one of the two: its end, and what was printed until both ended."""
    notes, out = tmp_path / "notes", tmp_path / "run"
    worker = str(Path(__file__).parent / "signal_worker.py")
    done = run(1, worker, "5", whom, str(int(number)), str(notes), *map(str, TINY), "--devices", "2",
               "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5")  # fmt: skip
    pid, deadline = notes.read_text(), time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, done.stderr[-3000:]
        time.sleep(0.05)
    return done


def test_a_stop_of_the_first_process_is_a_stop_of_those_it_started(photos, alone, tmp_path):
    done = disturbed(photos, tmp_path, "main", signal.SIGTERM)
    assert done.returncode == 143, done.stderr[-3000:]
    assert 5 <= state_of(tmp_path / "run").step < 15
    assert f"stopped by SIGTERM after step {state_of(tmp_path / 'run').step}" in done.stderr
    pretrain(1, photos, tmp_path / "run", "--resume")
    assert_same_images(alone, tmp_path / "run")


def test_a_process_that_is_killed_ends_the_one_that_started_it(photos, tmp_path):
    """By itself, naming it, or by Fabric, which looks every five seconds and names it too."""
    done = disturbed(photos, tmp_path, "self", signal.SIGKILL)
    assert done.returncode in (1, 2, -signal.SIGKILL), done.stderr[-3000:]
    pid = (tmp_path / "notes").read_text()
    printed = done.stderr.replace("\n", " ")
    named = re.search(rf"do not respond: 1\.|Child process with PID {pid} terminated with code -9", printed)
    assert named, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path / "run").step == 4


def test_the_first_process_killed_leaves_no_orphan(photos, tmp_path):
    """It alone writes, so what is kept is the last checkpoint before."""
    done = disturbed(photos, tmp_path, "main", signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path / "run").step == 4
