"""Every method on two ranks has the loss, gradients, queue and weights of one rank with the whole batch."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launcher import run
from tests.distributed.method_worker import CASES, STEPS, run_steps


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("methods") / "found.pt"
    done = run(2, "-m", "tests.distributed.method_worker", str(out), cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(out, weights_only=True)
    out.unlink()  # a hundred megabytes
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_result_of_one(two, name):
    one, found = run_steps(name), two[name]
    for step in range(STEPS):
        assert found["losses"][step] == pytest.approx(one["losses"][step], rel=1e-9, abs=1e-12), step
        expected = one["gradients"][step]
        assert expected.keys() == found["gradients"][step].keys()
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        empty = name in ("moco", "mocov2", "symmetric", "pirl", "drawn negatives", "detco")  # in the first step
        assert scale > 1e-6 or (empty and step == 0)
        for key, gradient in expected.items():
            assert float((found["gradients"][step][key] - gradient).abs().max()) <= 1e-10 * max(1.0, scale), key
    for key, value in one["state"].items():
        if value.is_floating_point():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-8, atol=1e-8, msg=key)
        else:
            assert torch.equal(found["state"][key], value), key
