"""Every evaluation and the color stage on a pretended GPU, on one rank and on eight: devices, host waits, precision."""

import json

import pytest

from tests.device.evaluations_parts import EVALUATIONS, ON_SEVERAL_RANKS
from tests.device.subprocess_runs import ADVICE, BUDGET, run_evaluations

STEPS = {"linear step": 1, "finetune step": 2}
"""Waits of a training step: the loss that is logged, and the check of its value."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return run_evaluations(tmp_path_factory.mktemp("pretended"))


@pytest.mark.parametrize(
    ("world_size", "name"), [("1", name) for name in EVALUATIONS] + [("8", name) for name in ON_SEVERAL_RANKS]
)
def test_an_evaluation_runs_on_the_device_with_the_recorded_waits(counted, world_size, name):
    found, recorded = counted[world_size][name], json.loads(BUDGET.read_text())["evaluations"][world_size]
    assert found["waits"] == recorded[name], f"{found['lines']}\n{ADVICE}"
    assert found["waits"] <= STEPS.get(name, found["waits"])
    assert found["finite"]
    assert found["devices"] == {"features": ["cpu", "pretend"], "knn": ["cpu"], "linear cached": ["cpu"]}.get(
        name, ["pretend"]
    )
    assert found["kernels"] > 0


@pytest.mark.parametrize("world_size", ["1", "8"])
def test_a_detector_convolves_in_half_and_pools_in_single_precision(counted, world_size):
    dtypes = counted[world_size]["detection step"]["dtypes"]
    assert dtypes["convolution"] == ["torch.bfloat16"]
    assert dtypes["roi_align"] == ["torch.float32"]


def test_evaluations_without_autocast_compute_in_single_precision(counted):
    for name in ("features", "finetune step", "color", "compiled color"):
        for kinds in counted["1"][name]["dtypes"].values():
            assert not {"torch.bfloat16", "torch.float16", "torch.float64"} & set(kinds), name


@pytest.mark.parametrize("name", ["finetune step", "detection step"])
def test_eight_ranks_share_a_step_on_the_device(counted, name):
    collectives = counted["8"][name]["collectives"]
    assert collectives["on the device"] > 0
    assert collectives.get("on the CPU", 0) <= (name == "detection step")  # the padding, through the hosts
    assert "barrier" not in collectives
    assert counted["1"][name]["collectives"] == {}
