"""The state of a run as a flat dict of tensors."""

import copy

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from snclr.checkpoint.state import collect_state, restore_state
from snclr.train.optim import build_optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(2, 3, 5, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["lars", "adamw", "sgd"])
def test_a_restored_optimizer_has_the_memory_format_of_the_parameters(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(name, net.named_parameters(), lr=0.1, weight_decay=0.01)
    train(net, optimizer, 2)
    saved = load(save({key: value.contiguous() for key, value in collect_state(net, optimizer).items()}))

    resumed = copy.deepcopy(net)
    again = build_optimizer(name, resumed.named_parameters(), lr=0.1, weight_decay=0.01)
    restore_state(saved, resumed, again)
    moments = [(p, value) for p, values in again.state.items() for value in values.values() if value.ndim == 4]
    assert len(moments) == (2 if name == "adamw" else 1)
    for parameter, moment in moments:
        assert moment.stride() == parameter.stride() != moment.contiguous().stride()

    train(net, optimizer, 2)
    train(resumed, again, 2)
    expected, found = collect_state(net, optimizer), collect_state(resumed, again)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
