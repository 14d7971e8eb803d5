"""The checks of `snclr doctor` run on a pretended GPU: they use its device for everything, and its values are right."""

import pytest

from snclr.diagnostics.methods import LIMITS
from tests.device.subprocess_runs import run_module


@pytest.fixture(scope="module")
def found():
    return run_module("doctor")


def test_kernels_on_the_device_pass(found):
    rows = {row["name"]: row for row in found["kernels"]}
    assert {row["outcome"] for row in rows.values()} == {"passed"}
    assert "color stage" in rows  # which is not applicable on a CPU
    assert 0 < rows["color stage"]["number"] < 1e-4  # blur by matrix products rounds differently


def test_methods_on_the_device_agree_with_the_cpu_in_float64(found):
    assert set(found["methods"]) == {"snclr", "snclr, ViT", "swav"}
    for name, error in found["methods"].items():
        assert 0 < error < LIMITS["32"], name


def test_overflow_is_stopped_and_every_part_can_be_timed(found):
    assert found["overflow"] == [True, True]
    assert found["parts"] == ["data", "color", "encoder", "loss", "optimizer", "step"]
