"""How many processes there are: as a launcher says, else as the flags say; and that Fabric is told just that."""

import os
import subprocess
import sys

import pytest
import torch

from snclr.cli import main
from snclr.errors import UserError
from snclr.train import launch
from snclr.train.launch import check_batch, start
from snclr.train.processes import Processes, find_processes, tasks_per_node

MEET = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "RANK": "5",
    "LOCAL_RANK": "1", "GROUP_RANK": "1", **MEET,
}  # fmt: skip
TORCHRUN_OF_ONE = {
    **TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_NODELIST": "node[7-9]",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
SRUN = {
    **BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "node[7-9]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in (*TORCHRUN, "NODE_RANK"):
            monkeypatch.delenv(name)


def under(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def numbers(found):
    return found.total, found.here, found.machines


def place(found):
    return found.rank, found.local_rank, found.machine, found.address, found.port


def test_flags_count_where_nothing_launched():
    assert find_processes("cpu", "1", 1) == find_processes("cpu", "auto", 1) == Processes(1, 1)
    found = find_processes("cpu", "3", 1)
    assert numbers(found) == (3, 3, 1)
    assert place(found)[:4] == (0, 0, 0, "127.0.0.1")
    assert found.port > 0


def test_on_one_machine_they_meet_on_that_machine_whatever_the_variables_say(monkeypatch):
    under(monkeypatch, {**MEET, "NODE_RANK": "1"})
    assert place(find_processes("cpu", "2", 1))[:4] == (0, 0, 0, "127.0.0.1")


def test_processes_that_were_started_start_no_others(monkeypatch):
    under(monkeypatch, {**MEET, "LOCAL_RANK": "1"})
    found = find_processes("cpu", "2", 1)
    assert (*numbers(found), found.rank, found.launcher) == (2, 2, 1, 1, "hand")


@pytest.mark.parametrize(
    ("variables", "expected", "where"),
    [
        (TORCHRUN, (8, 4, 2), (5, 1, 1, "first", 29500)),
        (TORCHRUN_OF_ONE, (1, 1, 1), (0, 0, 0, "first", 29500)),
        (SRUN, (6, 2, 3), (3, 1, 1, "node7", 15000 + (123456 + 1009) % 10000)),
        ({**SRUN, **MEET}, (6, 2, 3), (3, 1, 1, "first", 29500)),
    ],
)
def test_a_launchers_numbers_hold(monkeypatch, variables, expected, where):
    under(monkeypatch, variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for accelerator, devices, nodes in (("cpu", "1", 1), ("cuda", "auto", 1), ("cpu", str(expected[1]), expected[2])):
        found = find_processes(accelerator, devices, nodes)
        assert numbers(found) == expected
        assert place(found) == where


def test_tasks_need_not_be_the_same_number_on_every_node(monkeypatch):
    under(monkeypatch, {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})
    assert numbers(find_processes("cpu", "auto", 1)) == (5, 2, 3)
    under(monkeypatch, {"SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"})
    assert numbers(find_processes("cpu", "auto", 1)) == (5, 1, 3)


@pytest.mark.parametrize(
    ("text", "tasks"), [("", []), ("4", [4]), ("2,1", [2, 1]), ("2(x3),1,3(x2)", [2] * 3 + [1, 3, 3])]
)
def test_slurms_short_form_of_tasks(text, tasks):
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize(("devices", "nodes"), [("3", 1), ("4", 3)])
def test_flags_that_contradict_the_launcher_are_refused(monkeypatch, devices, nodes):
    under(monkeypatch, TORCHRUN)
    with pytest.raises(
        UserError, match=rf"torchrun started 4 of 8 processes .* but --devices {devices} --nodes {nodes}"
    ):
        find_processes("cpu", devices, nodes)


def test_torchrun_with_one_process_decides_too(monkeypatch):
    under(monkeypatch, TORCHRUN_OF_ONE)
    with pytest.raises(UserError, match=r"torchrun started 1 of 1 processes .* --nproc-per-node says how many"):
        find_processes("cpu", "2", 1)


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_a_batch_script_without_srun_is_a_start_like_any_other(monkeypatch, tasks):
    under(monkeypatch, {**BATCH, "SLURM_NTASKS": tasks})
    assert numbers(find_processes("cpu", "1", 1)) == (1, 1, 1)
    assert numbers(find_processes("cpu", "2", 1)) == (2, 2, 1)


def test_one_task_of_srun_starts_the_others_itself(monkeypatch):
    under(monkeypatch, {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"})
    assert numbers(find_processes("cpu", "2", 1)) == (2, 2, 1)


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_fabric_does_not_take_an_allocation_for_a_launch(monkeypatch, capsys, tasks):
    under(monkeypatch, {**BATCH, "SLURM_NTASKS": tasks})
    assert start(accelerator="cpu").world_size == 1
    said = capsys.readouterr().err
    assert said == "" if tasks == "1" else "SLURM allotted 8 tasks, but this command was not started by srun" in said


def test_fabric_is_told_what_was_found(monkeypatch):
    """Without meeting the others: the number, the ranks and the device of a task of srun on two nodes."""
    met = []
    monkeypatch.setattr(launch, "_meet", lambda fabric, processes, timeout: met.append(fabric))
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    under(monkeypatch, {k: v for k, v in SRUN.items() if k != "SLURM_NTASKS_PER_NODE"})
    fabric = start(accelerator="cpu")
    assert met == [fabric]
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank) == (6, 3, 1, 1)


@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "first"}, {**MEET, "NODE_RANK": ""}])
def test_machines_that_do_not_know_where_to_meet_are_told_both_ways(monkeypatch, given):
    under(monkeypatch, given)
    with pytest.raises(UserError) as caught:
        find_processes("cpu", "4", 2)
    text = str(caught.value)
    assert "NODE_RANK not set" in text
    assert "torchrun --nnodes 2 --nproc-per-node 4" in text
    assert "MASTER_ADDR=FIRST-MACHINE MASTER_PORT=29500 NODE_RANK=0 snclr ... --devices 4 --nodes 2" in text
    assert "srun" not in text


def test_in_a_slurm_job_srun_is_named(monkeypatch):
    under(monkeypatch, BATCH)
    with pytest.raises(UserError, match="put srun before the command"):
        find_processes("cpu", "1", 2)


def test_machines_that_know_where_to_meet(monkeypatch):
    under(monkeypatch, {**MEET, "NODE_RANK": "1"})
    found = find_processes("cpu", "3", 2)
    assert numbers(found) == (6, 3, 2)
    assert place(found) == (3, 0, 1, "first", 29500)


@pytest.mark.parametrize(
    ("name", "value"), [("NODE_RANK", "2"), ("NODE_RANK", "-1"), ("MASTER_PORT", "http"), ("MASTER_PORT", "0")]
)
def test_a_variable_that_cannot_be_is_named(monkeypatch, name, value):
    under(monkeypatch, {**MEET, "NODE_RANK": "1", name: value})
    with pytest.raises(UserError, match=rf"variable {name} is '{value}'; it must be a number from [01] to"):
        find_processes("cpu", "1", 2)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes on this machine need a GPU each, but each sees 1"):
        find_processes("cuda", "2", 1)
    under(monkeypatch, SRUN)
    with pytest.raises(UserError, match="--gpus-per-node, not --gpus-per-task"):
        find_processes("cuda", "auto", 1)


def test_a_notebook_is_for_one_process(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert find_processes("cpu", "1", 1) == Processes(1, 1)
    with pytest.raises(UserError, match="2 processes were asked for in a notebook"):
        find_processes("cpu", "2", 1)


@pytest.mark.parametrize("variables", [{}, SRUN])
def test_an_apple_gpu_is_for_one_process(monkeypatch, variables):
    under(monkeypatch, variables)
    with pytest.raises(UserError, match="an Apple GPU trains with one process"):
        find_processes("mps", "2", 1)


def test_processes_that_do_not_meet_are_not_a_traceback(monkeypatch):
    class Lonely:
        def launch(self):
            raise RuntimeError("timed out\nC++ frames")

    with pytest.raises(UserError, match=r"2 processes were to meet at 10.0.0.7:29500, but process 1 .*\(timed out\)"):
        launch._meet(Lonely(), Processes(2, 1, 2, rank=1, machine=1, address="10.0.0.7", port=29500), 60)


def test_one_program_has_one_number_of_processes():
    class Met:
        def launch(self):
            pass

    with pytest.raises(UserError, match="process 0 of 2 was asked for, but this is 0 of 1"):
        launch._meet(Met(), Processes(2, 2), 60)


@pytest.mark.parametrize(
    ("variables", "flags", "said"),
    [({}, ["--nodes", "2"], "torchrun --nnodes 2"), (TORCHRUN_OF_ONE, ["--devices", "2"], "torchrun started 1 of 1")],
)
def test_the_command_line_says_so_and_leaves_nothing_behind(monkeypatch, capsys, tmp_path, variables, flags, said):
    under(monkeypatch, variables)
    out = tmp_path / "run"
    assert main(["pretrain", "--accelerator", "cpu", "--data", str(tmp_path), "--out", str(out), *flags]) == 2
    assert main(["knn", str(out), "--device", "cpu", *flags]) == 2
    texts = capsys.readouterr().err.split("snclr knn: ")
    assert all(said in text for text in texts)
    assert len(texts) == 2
    assert not out.exists()


@pytest.mark.parametrize(("batch", "processes", "near"), [(256, 3, 255), (10, 4, 8), (1, 2, 2), (7, 2, 8)])
def test_the_nearest_batch_that_can_be_shared_is_named(batch, processes, near):
    with pytest.raises(UserError, match=rf"the nearest that can is {near}$"):
        check_batch(batch, processes)
    check_batch(near, processes)


def test_half_precision_is_refused_on_a_processor():
    with pytest.raises(UserError, match="precision bf16 is for GPUs"):
        start(accelerator="cpu", precision="bf16")


def test_fabric_is_imported_without_what_it_asks_only_for_its_version():
    script = (
        "import sys, snclr.train.fabric;"
        "assert 'lightning_fabric' in sys.modules and 'torchmetrics' not in sys.modules;"
        "from lightning_fabric.utilities.imports import _TORCHMETRICS_GREATER_EQUAL_1_0_0 as known;"
        "import torchmetrics; assert torchmetrics.Metric and known"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
