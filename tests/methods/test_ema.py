import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from snclr.methods.common.ema import auto_momentum, ema_update, momentum_at, momentum_copy


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def test_the_copy_is_independent_and_takes_no_gradient():
    online = network()
    momentum = momentum_copy(online)
    assert not any(p.requires_grad for p in momentum.parameters())
    assert all(p.requires_grad for p in online.parameters())
    assert momentum.training
    with torch.no_grad():
        online[3].bias.add_(1)
    assert not torch.equal(online[3].bias, momentum[3].bias)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.99, 0.996, 1.0])
def test_the_update_equals_a_naive_loop(m):
    torch.manual_seed(0)
    online, momentum = network(), momentum_copy(network())
    before = [p.clone() for p in momentum.parameters()]
    ema_update(online, momentum, m)
    for old, source, new in zip(before, online.parameters(), momentum.parameters(), strict=True):
        assert torch.equal(new, torch.lerp(old, source.detach(), 1.0 - m))
        torch.testing.assert_close(new, m * old + (1 - m) * source.detach(), rtol=1e-6, atol=1e-8)
    if m == 1.0:
        assert all(torch.equal(a, b) for a, b in zip(before, momentum.parameters(), strict=True))
    if m == 0.0:
        assert all(torch.equal(a, b) for a, b in zip(online.parameters(), momentum.parameters(), strict=True))


def test_equal_parameters_stay_bit_identical():
    torch.manual_seed(1)
    online = network()
    momentum = momentum_copy(online)
    for _ in range(50):
        ema_update(online, momentum, 0.99)
    assert all(torch.equal(a, b) for a, b in zip(online.parameters(), momentum.parameters(), strict=True))


def test_buffers_change_in_forward_passes_only():
    torch.manual_seed(2)
    online, momentum = network(), momentum_copy(network())
    online(torch.randn(8, 3, 4, 4) + 5)
    before = {name: value.clone() for name, value in momentum.named_buffers()}
    ema_update(online, momentum, 0.5)
    assert all(torch.equal(before[name], value) for name, value in momentum.named_buffers())
    momentum(torch.randn(8, 3, 4, 4))
    assert not torch.equal(before["1.running_mean"], momentum[1].running_mean)


def test_the_update_records_no_gradient_history():
    online, momentum = network(), momentum_copy(network())
    ema_update(online, momentum, 0.9)
    assert all(p.grad_fn is None and p.is_leaf for p in momentum.parameters())


@pytest.mark.parametrize(
    ("batch", "images", "expected"),
    [(4096, 1_281_167, 0.990009), (128, 7168, 0.944196), (128, 100, 0.5), (2, 10**6, 0.999)],
)
def test_auto_momentum_has_the_ratio_of_the_paper(batch, images, expected):
    assert auto_momentum(batch, images) == pytest.approx(expected, abs=1e-6)


def test_the_constant_schedule_is_constant():
    assert {momentum_at(step, 10, 0.99) for step in range(11)} == {0.99}


def test_the_cosine_schedule_starts_at_the_base_and_ends_at_one():
    assert momentum_at(0, 10, 0.9, "cosine") == pytest.approx(0.9, abs=1e-15)
    assert momentum_at(5, 10, 0.9, "cosine") == pytest.approx(0.95, abs=1e-15)
    assert momentum_at(10, 10, 0.9, "cosine") == 1.0
    assert momentum_at(99, 10, 0.9, "cosine") == 1.0


@given(total=st.integers(1, 10_000), base=st.floats(0, 1), data=st.data())
def test_the_cosine_schedule_never_falls_and_stays_below_one(total, base, data):
    step = data.draw(st.integers(0, total - 1))
    current, following = momentum_at(step, total, base, "cosine"), momentum_at(step + 1, total, base, "cosine")
    assert base - 1e-12 <= current <= following + 1e-12
    assert following <= 1.0
