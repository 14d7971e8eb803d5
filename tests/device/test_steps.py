"""A training step of every method on a pretended GPU, on one rank and on eight: devices, host waits, precision."""

import json

import pytest

from snclr.methods.config import METHODS
from tests.device.subprocess_runs import ADVICE, BUDGET, run_module


@pytest.fixture(scope="module", params=["1", "8"])
def counted(request):
    return request.param, run_module("steps", request.param)


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_as_often_as_recorded(counted, method):
    world_size, found = counted
    recorded = json.loads(BUDGET.read_text())[world_size]
    assert found[method]["waits"] == recorded[method], f"{found[method]['lines']}\n{ADVICE}"
    assert found[method]["waits"]["step"] <= 4
    assert found[method]["devices"] == ["pretend"]


@pytest.mark.parametrize("method", METHODS)
def test_networks_compute_in_half_and_losses_in_single_precision(counted, method):
    dtypes = counted[1][method]["dtypes"]
    assert counted[1][method]["loss_dtype"] == "torch.float32"
    assert dtypes["convolution"] == ["torch.bfloat16"]
    for name in ("exp", "_softmax", "_log_softmax", "logsumexp", "linalg_vector_norm"):
        assert dtypes.get(name, ["torch.float32"]) == ["torch.float32"], name


def test_eight_ranks_communicate_on_the_device(counted):
    world_size, found = counted
    for method, counts in found.items():
        collectives = counts["collectives"]
        assert collectives.get("on the CPU", 0) == 0, method
        assert (collectives.get("on the device", 0) > 0) == (world_size == "8"), method
        assert "barrier" not in collectives
