import torch
from torch import nn

from snclr.methods.common.heads import Prototypes, mlp


def layer_names(head: nn.Sequential) -> list[str]:
    return [type(part).__name__ for part in head]


def test_the_default_head_is_byols():
    head = mlp(512)
    assert layer_names(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert (head[0].in_features, head[0].out_features, head[3].out_features) == (512, 4096, 256)
    assert head[0].bias is None
    assert head[1].affine
    assert head[3].bias is not None
    assert mlp(512, final_bias=False)[3].bias is None


def test_the_final_batch_norm_standardizes_the_output():
    head = mlp(8, 16, 4, layers=3, final_bn=True)
    assert layer_names(head) == [
        "Linear",
        "BatchNorm1d",
        "ReLU",
        "Linear",
        "BatchNorm1d",
        "ReLU",
        "Linear",
        "BatchNorm1d",
    ]
    assert [part.bias is None for part in head if isinstance(part, nn.Linear)] == [True, True, True]
    assert [part.affine for part in head if isinstance(part, nn.BatchNorm1d)] == [True, True, False]
    torch.manual_seed(0)
    out = head(torch.randn(64, 8))
    assert out.shape == (64, 4)
    # Without scale and shift each output is standardized over the batch.
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(dim=0, unbiased=False), torch.ones(4), atol=1e-2, rtol=0)


def test_a_head_of_one_layer_is_linear():
    head = mlp(3, 99, 2, layers=1)
    assert layer_names(head) == ["Linear"]
    x = torch.randn(5, 3)
    torch.testing.assert_close(head(x), x @ head[0].weight.T + head[0].bias)


def test_a_head_of_no_layers_is_the_identity():
    x = torch.randn(5, 3)
    assert torch.equal(mlp(3, 99, 3, layers=0)(x), x)


def test_every_parameter_gets_a_gradient():
    head = mlp(8, 16, 4, layers=3)
    head(torch.randn(12, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_without_batch_norm_every_layer_has_a_bias():
    head = mlp(8, 16, 4, layers=3, hidden_bn=False, activation=nn.GELU)
    assert layer_names(head) == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    assert all(part.bias is not None for part in head if isinstance(part, nn.Linear))


def test_prototype_scores_are_cosines_for_vectors_of_any_length():
    layer = Prototypes(4, 6)
    x = torch.randn(3, 4)
    expected = torch.stack([nn.functional.cosine_similarity(x, row[None]) for row in layer.weight.detach()], dim=1)
    torch.testing.assert_close(layer(x).detach(), expected)
    with torch.no_grad():
        layer.weight.mul_(7)
    torch.testing.assert_close(layer(5 * x).detach(), expected)


def test_frozen_prototypes_have_the_same_scores_and_zero_gradient():
    layer = Prototypes(4, 6)
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(layer(x, frozen=True), layer(x))
    layer(x, frozen=True).square().sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(6, 4))
    assert x.grad.abs().sum() > 0
    layer(x).square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0
