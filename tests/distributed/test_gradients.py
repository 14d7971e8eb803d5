"""`GradientAverager`: the mean over the ranks, by the same order of sums in every step."""

from pathlib import Path

import torch

from tests.distributed.gradient_worker import loss, network, rows
from tests.distributed.launcher import run

RANKS = 3


def test_gradients_are_the_mean_over_the_ranks_and_equal_in_every_step(tmp_path):
    done = run(
        RANKS, "-m", "tests.distributed.gradient_worker", str(tmp_path / "found.pt"), cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert found["buckets"] > 2
    net = network()
    sum(loss(net, rows(rank, part)) / RANKS for rank in range(RANKS) for part in (0, 1)).backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert found["gradients"][0].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found["gradients"][0][name], gradient, rtol=1e-5, atol=1e-6)
        assert found["gradients"][0][name].stride() == net.get_parameter(name).stride()
        assert all(torch.equal(later[name], found["gradients"][0][name]) for later in found["gradients"][1:])
