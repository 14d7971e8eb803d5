"""The command line on several ranks: resume with another world size, bad images, errors, launchers, signals."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from snclr.checkpoint.format import latest_checkpoint
from tests.distributed.launcher import HANG_SECONDS, run, run_processes, snclr, torchrun
from tests.helpers.noise_images import write_noise
from tests.helpers.state_digest import digest

TINY = (
    "pretrain", "--recipe", "demo", "--batch-size", 8, "--epochs", 3, "--image-size", 16, "--queue-length", 30,
    "--neighbors", 3, "--hidden", 16, "--dim", 8, "--workers", 0, "--optimizer", "sgd", "--lr", 0.1,
    "--warmup-epochs", 0, "--checkpoint-every", 4, "--log-every", 1, "--precision", 64,
)  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """40 small photos of two classes, five of them unreadable."""
    folder = write_noise(tmp_path_factory.mktemp("photos"), 40, size=(20, 20), classes="ab", digits=2)
    for index in range(3, 40, 8):
        path = folder / "ab"[index % 2] / f"{index:02}.png"
        path.write_bytes(path.read_bytes()[:60])
    return folder


def state_of(out):
    found = latest_checkpoint(out / "checkpoints", lambda text: pytest.fail(text))
    assert found is not None
    return found


def pretrain(ranks, photos, out, *more):
    return snclr(ranks, *TINY, "--data", photos, "--out", out, "--max-bad-share", 0.5, *more)


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    pretrain(1, photos, out)
    return out


def stop_after(ranks, photos, out, step):
    """Train on this number of ranks and stop by SIGTERM after `step`."""
    done = run(ranks, str(Path(__file__).parent / "stop_worker.py"), str(step), *(str(a) for a in TINY),
               "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5", "--resume")  # fmt: skip
    assert state_of(out).step == step, done.stderr[-3000:]


def test_a_run_resumes_with_another_world_size(photos, alone, tmp_path):
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


def test_every_launcher_gives_the_same_run_and_the_ranks_share_the_list_of_bad_images(photos, alone, tmp_path):
    command = ("-m", "snclr", *map(str, TINY), "--data", str(photos), "--max-bad-share", "0.5", "--out")
    launched = {"torchrun": torchrun(2, *command, str(tmp_path / "torchrun"))}
    launched["devices"] = run(1, *command, str(tmp_path / "devices"), "--devices", "2")
    launched["variables"] = run(2, *command, str(tmp_path / "variables"))
    digests = set()
    for name, done in launched.items():
        assert done.returncode == 0, done.stderr[-3000:]
        assert "2 ranks" in done.stderr, name
        end = state_of(tmp_path / name)
        digests.add(digest(end.tensors, end.step))
        assert (tmp_path / name / "skipped.jsonl").read_text() == (alone / "skipped.jsonl").read_text()
        assert_same_images(alone, tmp_path / name)
    assert len(digests) == 1


def test_an_indivisible_batch_size_is_refused_with_the_nearest_valid_one(photos, tmp_path):
    out = tmp_path / "run"
    done = run(
        2, "-m", "snclr", "pretrain", "--recipe", "demo", "--batch-size", "7", "--data", str(photos), "--out", str(out)
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert "--batch-size 7 is not divisible by 2 ranks; the nearest that is: 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_too_many_bad_images_stop_all_ranks(photos, tmp_path):
    done = run(
        2, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(tmp_path / "r"), "--max-bad-share", "0.1"
    )
    assert done.returncode != 0
    assert "are bad; a share of at most 0.1 is allowed" in done.stderr


def assert_same_images(alone, out):
    """Check that the queue holds the same images in the same order, so that every step had the same batch."""
    expected, found = state_of(alone), state_of(out)
    assert found.step == expected.step
    assert torch.equal(found.tensors["method/criterion.queue.ids"], expected.tensors["method/criterion.queue.ids"])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_with_variables(photos, out, variables, *more):
    """Run the command once for each set of environment variables at the same time, as srun does; return stderr."""
    done = run_processes(
        variables, "-m", "snclr", *map(str, TINY), "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5",
        *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_devices_starts_the_ranks_in_a_batch_script_without_srun(photos, alone, tmp_path):
    """SLURM has allocated tasks, but srun did not start them: its variables are not those of a launcher."""
    allocated = {
        "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_NODELIST": "nowhere",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    }  # fmt: skip
    printed = run_with_variables(photos, tmp_path / "run", [allocated], "--devices", "2")
    assert "2 ranks" in printed
    assert "SLURM allocated 8 tasks, but only 2 will run" in printed
    assert_same_images(alone, tmp_path / "run")


def test_tasks_of_srun_are_the_ranks(photos, alone, tmp_path):
    """Two tasks per node, by `srun -N 2 -n 4` without --ntasks-per-node."""
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
    printed = run_with_variables(photos, tmp_path / "run", each)
    assert f"{tasks} ranks" in printed
    assert_same_images(alone, tmp_path / "run")


def test_three_variables_connect_two_nodes(photos, alone, tmp_path):
    """Both nodes are this machine; they differ in NODE_RANK."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    each = [{**address, "NODE_RANK": str(rank)} for rank in range(2)]
    printed = run_with_variables(photos, tmp_path / "run", each, "--nodes", "2", "--devices", "1")
    assert "2 ranks" in printed
    assert printed.count(f"connecting 2 nodes at 127.0.0.1:{address['MASTER_PORT']}") == 2
    assert_same_images(alone, tmp_path / "run")


def run_with_signal(photos, tmp_path, target, number):
    """Run with `--devices 2`, send a signal to one rank after step 5, and wait until both have ended."""
    pid_file, out = tmp_path / "pid", tmp_path / "run"
    worker = str(Path(__file__).parent / "signal_worker.py")
    done = run(1, worker, "5", target, str(int(number)), str(pid_file), *map(str, TINY), "--devices", "2",
               "--data", str(photos), "--out", str(out), "--max-bad-share", "0.5")  # fmt: skip
    pid, deadline = pid_file.read_text(), time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, done.stderr[-3000:]
        time.sleep(0.05)
    return done


def test_a_stop_signal_to_rank_0_stops_all_ranks(photos, alone, tmp_path):
    done = run_with_signal(photos, tmp_path, "rank0", signal.SIGTERM)
    assert done.returncode == 143, done.stderr[-3000:]
    assert 5 <= state_of(tmp_path / "run").step < 15
    assert f"stopped by SIGTERM after step {state_of(tmp_path / 'run').step}" in done.stderr
    pretrain(1, photos, tmp_path / "run", "--resume")
    assert_same_images(alone, tmp_path / "run")


def test_a_killed_rank_ends_rank_0_which_names_it(photos, tmp_path):
    """The failed collective names rank 1, or Fabric names its process, which it checks every five seconds."""
    done = run_with_signal(photos, tmp_path, "self", signal.SIGKILL)
    assert done.returncode in (1, 2, -signal.SIGKILL), done.stderr[-3000:]
    pid = (tmp_path / "pid").read_text()
    printed = done.stderr.replace("\n", " ")
    named = re.search(rf"do not respond: 1\.|Child process with PID {pid} terminated with code -9", printed)
    assert named, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path / "run").step == 4


def test_the_other_rank_ends_when_rank_0_is_killed(photos, tmp_path):
    """Only rank 0 writes, so the last checkpoint is that of step 4."""
    done = run_with_signal(photos, tmp_path, "rank0", signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path / "run").step == 4
