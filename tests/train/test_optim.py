import copy
import io

import pytest
import torch
from torch import Tensor, nn

from snclr.train.optim import LARS, build_optimizer, scaled_lr, takes_decay

LR, DECAY, MOMENTUM, TRUST = 0.3, 1e-2, 0.9, 0.001


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 2))


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def naive_lars(params: list[Tensor], mus: list[Tensor], lr: float = LR) -> None:
    """One step, tensor by tensor, from the definition."""
    for p, mu in zip(params, mus, strict=True):
        u = p.grad
        if p.ndim > 1:
            u = u + DECAY * p.data
            p_norm, u_norm = p.data.norm(), u.norm()
            u = u * (TRUST * p_norm / u_norm if p_norm > 0 and u_norm > 0 else 1.0)
        mu.mul_(MOMENTUM).add_(u)
        p.data.add_(mu, alpha=-lr)


def test_lars_matches_the_naive_loop():
    ours, reference = network(), network()
    optimizer = LARS(ours.parameters(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, trust=TRUST)
    mus = [torch.zeros_like(p) for p in reference.parameters()]
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(reference, step)
        gradients = [p.grad.clone() for p in ours.parameters()]
        optimizer.step()
        naive_lars(list(reference.parameters()), mus)
        for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(g, p.grad) for g, p in zip(gradients, ours.parameters(), strict=True))


def test_a_lars_step_is_proportional_to_the_norm_of_the_weight():
    weight = nn.Parameter(torch.randn(6, 7, generator=torch.Generator().manual_seed(3)))
    before, norm = weight.detach().clone(), weight.detach().norm()
    weight.grad = 1e4 * torch.randn(6, 7, generator=torch.Generator().manual_seed(4))
    LARS([weight], lr=0.5).step()
    assert float((weight.detach() - before).norm()) == pytest.approx(0.5 * TRUST * float(norm), rel=1e-4)


def test_lars_stays_finite_for_zero_weights_and_gradients():
    zero, still = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(2, 3))
    zero.grad, still.grad = torch.ones(2, 3), torch.zeros(2, 3)
    LARS([zero, still], lr=0.1).step()
    torch.testing.assert_close(zero.data, torch.full((2, 3), -0.1))
    assert torch.equal(still.data, torch.ones(2, 3))


def test_lars_skips_parameters_without_gradient():
    net = network()
    before = copy.deepcopy(net.state_dict())
    set_gradients(net, 0)
    net[3].weight.grad = None
    optimizer = LARS(net.parameters(), lr=LR)
    optimizer.step()
    assert torch.equal(net[3].weight, before["3.weight"])
    assert not torch.equal(net[4].weight, before["4.weight"])
    assert net[3].weight not in optimizer.state


@pytest.mark.parametrize("name", ["lars", "adamw", "sgd"])
def test_an_optimizer_resumed_from_its_state_takes_the_same_steps(name):
    whole, parts = network(), network()
    first = build_optimizer(name, whole.named_parameters(), lr=0.1, weight_decay=DECAY)
    second = build_optimizer(name, parts.named_parameters(), lr=0.1, weight_decay=DECAY)
    for step in range(4):
        if step == 2:
            file = io.BytesIO()
            torch.save(second.state_dict(), file)
            file.seek(0)
            second = build_optimizer(name, parts.named_parameters(), lr=99.0, weight_decay=0.0)
            second.load_state_dict(torch.load(file, weights_only=True))
        for net, optimizer in ((whole, first), (parts, second)):
            set_gradients(net, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_groups_split_by_decay_in_the_given_order():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
            self.norm = nn.LayerNorm(4)
            self.fc = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

    net = nn.ModuleDict({"encoder": Tokens(), "head": nn.Linear(4, 2)})
    optimizer = build_optimizer("adamw", net.named_parameters(), lr=1e-3, weight_decay=0.1)
    names = {id(p): name for name, p in net.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert groups[0] == ["encoder.fc.weight", "head.weight"]
    tokens = ["encoder.cls_token", "encoder.pos_embed"]
    assert groups[1] == [*tokens, "encoder.norm.weight", "encoder.norm.bias", "encoder.fc.bias", "head.bias"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_weight_decay_on_all_spares_no_parameter():
    net = network()
    before = copy.deepcopy(net.state_dict())
    optimizer = build_optimizer("adamw", net.named_parameters(), lr=0.1, weight_decay=0.5, weight_decay_on="all")
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.data, before[name] * (1 - 0.1 * 0.5))


def test_no_decay_group_is_not_decayed():
    net = network()
    before = copy.deepcopy(net.state_dict())
    optimizer = build_optimizer("adamw", net.named_parameters(), lr=0.1, weight_decay=0.5)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        if takes_decay(name, p):
            torch.testing.assert_close(p.data, before[name] * (1 - 0.1 * 0.5))
        else:
            assert torch.equal(p.data, before[name])


def test_each_name_gives_its_optimizer_with_the_momentum_of_the_papers():
    parameters = list(network().named_parameters())
    made = {name: build_optimizer(name, parameters, lr=0.1, weight_decay=0.0) for name in ("lars", "adamw", "sgd")}
    assert [type(optimizer) for optimizer in made.values()] == [LARS, torch.optim.AdamW, torch.optim.SGD]
    assert (made["lars"].defaults["momentum"], made["lars"].defaults["trust"]) == (0.9, 0.001)
    assert made["adamw"].defaults["betas"] == (0.9, 0.999)
    assert made["sgd"].defaults["momentum"] == 0.9


def test_the_learning_rate_scales_linearly_with_the_batch():
    assert scaled_lr(0.3, 4096) == pytest.approx(4.8)
    assert scaled_lr(1.5e-4, 256) == 1.5e-4


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_fused_optimizer_takes_the_same_steps(name):
    layers = [nn.Linear(5, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, fused in zip(layers, (False, True), strict=True):
        optimizer = build_optimizer(name, layer.named_parameters(), lr=0.1, weight_decay=0.2, fused=fused)
        assert bool(optimizer.defaults["fused"]) == fused
        for seed in range(3):
            optimizer.zero_grad()
            layer(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layers[1].weight, layers[0].weight, rtol=1e-5, atol=1e-6)
