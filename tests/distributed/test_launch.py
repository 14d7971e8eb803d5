"""The ranks of a job: from a launcher, else from the flags; Fabric gets the same."""

import os
import sys

import pytest
import torch

from snclr.cli.main import main
from snclr.distributed import launch
from snclr.distributed.environment import ResolvedEnvironment, resolve_environment, tasks_per_node
from snclr.distributed.launch import check_batch_size
from snclr.errors import UserError

ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "RANK": "5",
    "LOCAL_RANK": "1", "GROUP_RANK": "1", **ADDRESS,
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
    for name in (*TORCHRUN, "NODE_RANK"):
        monkeypatch.setenv(name, "")  # restored afterward, also where `launch` sets it
        monkeypatch.delenv(name)
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


def set_env(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def sizes(env):
    return env.world_size, env.local_world_size, env.num_nodes


def position(env):
    return env.rank, env.local_rank, env.node_rank, env.address, env.port


def test_the_flags_decide_without_a_launcher():
    assert resolve_environment("cpu", "1", 1) == resolve_environment("cpu", "auto", 1) == ResolvedEnvironment(1, 1)
    env = resolve_environment("cpu", "3", 1)
    assert sizes(env) == (3, 3, 1)
    assert position(env)[:4] == (0, 0, 0, "127.0.0.1")
    assert env.port > 0


def test_a_single_node_ignores_leftover_address_variables(monkeypatch):
    set_env(monkeypatch, {**ADDRESS, "NODE_RANK": "1"})
    assert position(resolve_environment("cpu", "2", 1))[:4] == (0, 0, 0, "127.0.0.1")


def test_a_rank_started_by_hand_starts_no_other_ranks(monkeypatch):
    set_env(monkeypatch, {**ADDRESS, "LOCAL_RANK": "1"})
    env = resolve_environment("cpu", "2", 1)
    assert (*sizes(env), env.rank, env.launcher) == (2, 2, 1, 1, "manual")


@pytest.mark.parametrize(
    ("variables", "expected", "where"),
    [
        (TORCHRUN, (8, 4, 2), (5, 1, 1, "first", 29500)),
        (TORCHRUN_OF_ONE, (1, 1, 1), (0, 0, 0, "first", 29500)),
        (SRUN, (6, 2, 3), (3, 1, 1, "node7", 15000 + (123456 + 1009) % 10000)),
        ({**SRUN, **ADDRESS}, (6, 2, 3), (3, 1, 1, "first", 29500)),
    ],
)
def test_the_launcher_decides_the_world_size(monkeypatch, variables, expected, where):
    set_env(monkeypatch, variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for accelerator, devices, nodes in (("cpu", "1", 1), ("cuda", "auto", 1), ("cpu", str(expected[1]), expected[2])):
        env = resolve_environment(accelerator, devices, nodes)
        assert sizes(env) == expected
        assert position(env) == where


def test_nodes_may_have_different_numbers_of_tasks(monkeypatch):
    set_env(monkeypatch, {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})
    assert sizes(resolve_environment("cpu", "auto", 1)) == (5, 2, 3)
    set_env(monkeypatch, {"SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"})
    assert sizes(resolve_environment("cpu", "auto", 1)) == (5, 1, 3)


@pytest.mark.parametrize(
    ("text", "tasks"), [("", []), ("4", [4]), ("2,1", [2, 1]), ("2(x3),1,3(x2)", [2] * 3 + [1, 3, 3])]
)
def test_slurm_tasks_per_node_are_parsed(text, tasks):
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize(("devices", "nodes"), [("3", 1), ("4", 3)])
def test_flags_that_contradict_the_launcher_are_refused(monkeypatch, devices, nodes):
    set_env(monkeypatch, TORCHRUN)
    with pytest.raises(
        UserError, match=rf"torchrun started 4 of 8 ranks .* contradicts --devices {devices} --nodes {nodes}"
    ):
        resolve_environment("cpu", devices, nodes)


def test_torchrun_with_one_rank_decides_too(monkeypatch):
    set_env(monkeypatch, TORCHRUN_OF_ONE)
    with pytest.raises(UserError, match=r"torchrun started 1 of 1 ranks .* torchrun's --nproc-per-node"):
        resolve_environment("cpu", "2", 1)


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_a_batch_script_without_srun_uses_the_flags(monkeypatch, tasks):
    set_env(monkeypatch, {**BATCH, "SLURM_NTASKS": tasks})
    assert sizes(resolve_environment("cpu", "1", 1)) == (1, 1, 1)
    assert sizes(resolve_environment("cpu", "2", 1)) == (2, 2, 1)


def test_a_single_srun_task_uses_the_flags(monkeypatch):
    set_env(monkeypatch, {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"})
    assert sizes(resolve_environment("cpu", "2", 1)) == (2, 2, 1)


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_an_allocation_without_srun_is_not_a_launch(monkeypatch, capsys, tasks):
    set_env(monkeypatch, {**BATCH, "SLURM_NTASKS": tasks})
    assert launch.launch(device="cpu").world_size == 1
    printed = capsys.readouterr().err
    assert printed == "" if tasks == "1" else "SLURM allocated 8 tasks, but only 1 will run" in printed


def test_fabric_gets_the_resolved_ranks(monkeypatch):
    """Without a connection: the world size and ranks of a task of srun on three nodes."""
    connected = []
    monkeypatch.setattr(launch, "_connect", lambda fabric, env, timeout: connected.append(fabric))
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    set_env(monkeypatch, {k: v for k, v in SRUN.items() if k != "SLURM_NTASKS_PER_NODE"})
    fabric = launch.launch(device="cpu")
    assert connected == [fabric]
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank) == (6, 3, 1, 1)


@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "first"}, {**ADDRESS, "NODE_RANK": ""}])
def test_a_missing_address_error_shows_torchrun_and_the_variables(monkeypatch, given):
    set_env(monkeypatch, given)
    with pytest.raises(UserError) as caught:
        resolve_environment("cpu", "4", 2)
    text = str(caught.value)
    assert "NODE_RANK" in text.partition("not set: ")[2].partition(". Put torchrun")[0]
    assert "MASTER_ADDR=FIRST-NODE MASTER_PORT=29500 NODE_RANK=0 snclr ... --devices 4 --nodes 2" in text


def test_variables_give_the_address_of_several_nodes(monkeypatch):
    set_env(monkeypatch, {**ADDRESS, "NODE_RANK": "1"})
    env = resolve_environment("cpu", "3", 2)
    assert sizes(env) == (6, 3, 2)
    assert position(env) == (3, 0, 1, "first", 29500)


@pytest.mark.parametrize(
    ("name", "value"), [("NODE_RANK", "2"), ("NODE_RANK", "-1"), ("MASTER_PORT", "http"), ("MASTER_PORT", "0")]
)
def test_an_invalid_variable_is_named(monkeypatch, name, value):
    set_env(monkeypatch, {**ADDRESS, "NODE_RANK": "1", name: value})
    with pytest.raises(UserError, match=rf"variable {name} is '{value}'; it must be a number from [01] to"):
        resolve_environment("cpu", "1", 2)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 ranks on this node need one GPU each, but 1 are visible"):
        resolve_environment("cuda", "2", 1)
    set_env(monkeypatch, SRUN)
    with pytest.raises(UserError, match="--gpus-per-node, not --gpus-per-task"):
        resolve_environment("cuda", "auto", 1)


def test_a_notebook_supports_one_rank(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert resolve_environment("cpu", "1", 1) == ResolvedEnvironment(1, 1)
    with pytest.raises(UserError, match="2 ranks cannot be started from a notebook"):
        resolve_environment("cpu", "2", 1)


@pytest.mark.parametrize("variables", [{}, SRUN])
def test_an_apple_gpu_supports_one_rank(monkeypatch, variables):
    set_env(monkeypatch, variables)
    with pytest.raises(UserError, match="an Apple GPU supports one rank"):
        resolve_environment("mps", "2", 1)


def test_a_failed_connection_is_a_user_error(monkeypatch):
    class Unconnected:
        def launch(self):
            raise RuntimeError("timed out\nC++ frames")

    with pytest.raises(UserError, match=r"rank 1 could not connect to all 2 ranks at 10.0.0.7:29500 \(timed out\)"):
        launch._connect(
            Unconnected(), ResolvedEnvironment(2, 1, 2, rank=1, node_rank=1, address="10.0.0.7", port=29500), 60
        )


def test_a_program_has_one_world_size():
    class Connected:
        def launch(self):
            pass

    with pytest.raises(UserError, match="requested rank 0 of 2, but this is rank 0 of 1"):
        launch._connect(Connected(), ResolvedEnvironment(2, 2), 60)


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [({}, ["--nodes", "2"], "Put torchrun"), (TORCHRUN_OF_ONE, ["--devices", "2"], "torchrun started 1 of 1")],
)
def test_the_command_line_prints_launch_errors_and_writes_nothing(
    monkeypatch, capsys, tmp_path, run, variables, flags, message
):
    set_env(monkeypatch, variables)
    out = tmp_path / "run"
    assert main(["pretrain", "--device", "cpu", "--data", "demo", "--out", str(out), *flags]) == 2
    assert main(["knn", str(run), "--device", "cpu", *flags]) == 2
    texts = capsys.readouterr().err.split("snclr knn: ")
    assert all(message in text for text in texts)
    assert len(texts) == 2
    assert not out.exists()


@pytest.mark.parametrize(("batch", "processes", "near"), [(256, 3, 255), (10, 4, 8), (1, 2, 2), (7, 2, 8)])
def test_an_indivisible_batch_size_names_the_nearest_valid_one(batch, processes, near):
    with pytest.raises(UserError, match=rf"the nearest that is: {near}$"):
        check_batch_size(batch, processes)
    check_batch_size(near, processes)


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [1]), ("cuda", 1)])
def test_one_gpu_can_be_selected(monkeypatch, device, expected):
    """Without a GPU: Fabric gets the GPU's index."""
    given = {}

    class Fabric:
        def __init__(self, **options):
            given.update(options)

    monkeypatch.setattr("lightning_fabric.Fabric", Fabric)
    monkeypatch.setattr(launch, "_connect", lambda fabric, env, timeout: None)
    monkeypatch.setattr("snclr.runtime.device.available_devices", lambda: ["cuda:0", "cuda:1", "cpu"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    launch.launch(device=device)
    assert (given["accelerator"], given["devices"]) == ("cuda", expected)
    with pytest.raises(UserError, match="--device cuda:1 selects one GPU, but there are 2 ranks"):
        launch.launch(device="cuda:1", devices="2")


def test_half_precision_is_refused_on_cpus():
    with pytest.raises(UserError, match="precision bf16 is not supported on CPUs"):
        launch.launch(device="cpu", precision="bf16")
    with pytest.raises(UserError, match="precision 16 is not supported on CPUs"):
        launch.launch(device="cpu", precision="16-mixed")
