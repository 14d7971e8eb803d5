"""Synchronized batch norm on several ranks against torch's batch norm of the whole batch, value and gradient."""

from pathlib import Path

import pytest
import timm
import torch

from snclr.distributed import sync_batch_norm
from tests.distributed.batch_norm_cases import CASES, build
from tests.distributed.launcher import run


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("norm") / "found.pt"
    done = run(request.param, "-m", "tests.distributed.batch_norm_worker", str(out), cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_it_is_batch_norm_of_the_whole_batch(found, name):
    norm, x, weight = build(name)
    x.requires_grad_()
    y = norm(x)
    (y * weight).sum().backward()
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found[name]["output"], y.detach(), **close)
    torch.testing.assert_close(found[name]["input"], x.grad, **close)
    torch.testing.assert_close(found[name]["parameters"], [part.grad for part in norm.parameters()], **close)
    torch.testing.assert_close(found[name]["state"], norm.state_dict(), **close)
    if norm.track_running_stats:  # without them, evaluation uses the statistics of each rank's own batch
        torch.testing.assert_close(found[name]["evaluated"], norm.eval()(x).detach(), **close)


@pytest.mark.parametrize(
    "name", ["test_efficientnet", "regnetx_002", "densenet121", "mobilenetv3_small_050", "resnetv2_18"]
)
def test_a_model_with_activations_in_its_norms_keeps_its_outputs(name, monkeypatch):
    model, x = timm.create_model(name, num_classes=0).eval(), torch.randn(2, 3, 64, 64)
    expected = model(x)
    monkeypatch.setattr(sync_batch_norm, "is_distributed", lambda: True)
    sync_batch_norm.synchronize_batch_norm(model)
    assert any(isinstance(layer, sync_batch_norm.SyncBatchNorm) for layer in model.modules())
    assert torch.equal(model(x), expected)
