"""How many processes there are: as a launcher says, else as the flags say."""

import pytest

from snclr.errors import UserError
from snclr.train.launch import _processes, check_batch, start

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def under(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_flags_count_where_nothing_launched():
    assert _processes("cpu", "1", 1) == (1, 1)
    assert _processes("cpu", "auto", 1) == (1, 1)
    assert _processes("cpu", "3", 2) == (3, 2)


@pytest.mark.parametrize(("variables", "expected"), [(TORCHRUN, (4, 2)), (SRUN, (2, 3))])
def test_a_launchers_numbers_hold(monkeypatch, variables, expected):
    under(monkeypatch, variables)
    assert _processes("cpu", "1", 1) == expected
    assert _processes("cuda", "auto", 1) == expected
    assert _processes("cpu", str(expected[0]), expected[1]) == expected


@pytest.mark.parametrize(("devices", "nodes"), [("3", 1), ("4", 3)])
def test_flags_that_contradict_the_launcher_are_refused(monkeypatch, devices, nodes):
    under(monkeypatch, TORCHRUN)
    with pytest.raises(
        UserError, match=rf"torchrun started 4 processes on each of 2 machines, but --devices {devices}"
    ):
        _processes("cpu", devices, nodes)


def test_a_batch_script_without_srun_is_one_process(monkeypatch):
    under(monkeypatch, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"})
    assert _processes("cpu", "1", 1) == (1, 1)


@pytest.mark.parametrize(("batch", "processes", "near"), [(256, 3, 255), (10, 4, 8), (1, 2, 2), (7, 2, 8)])
def test_the_nearest_batch_that_can_be_shared_is_named(batch, processes, near):
    with pytest.raises(UserError, match=rf"the nearest that can is {near}$"):
        check_batch(batch, processes)
    check_batch(near, processes)


def test_half_precision_is_refused_on_a_processor():
    with pytest.raises(UserError, match="precision bf16 is for GPUs"):
        start(accelerator="cpu", precision="bf16")
