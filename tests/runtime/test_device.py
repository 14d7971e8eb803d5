"""The choice of a device on simulated machines."""

from __future__ import annotations

import pytest
import torch

from snclr.errors import UserError
from snclr.runtime.device import available_devices, pick_device


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("gpus", "mps", "auto", "available"),
    [(0, False, "cpu", ["cpu"]), (0, True, "mps", ["mps", "cpu"]), (2, False, "cuda", ["cuda:0", "cuda:1", "cpu"])],
)
def test_auto_is_the_best_device_and_every_available_one_is_accepted(monkeypatch, gpus, mps, auto, available):
    machine(monkeypatch, gpus, mps)
    assert available_devices() == available
    assert pick_device("auto") == auto
    assert [pick_device(name) for name in available] == available
    assert pick_device(auto) == auto


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "meta", "xla", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_a_missing_device_is_refused_with_the_available_ones(monkeypatch, device):
    machine(monkeypatch, 0, False)
    with pytest.raises(UserError, match=r"choose auto or one of cpu$"):
        pick_device(device)


def test_gpus_are_counted_and_index_0_may_be_omitted(monkeypatch):
    machine(monkeypatch, 2, True)
    with pytest.raises(UserError, match="cuda:0, cuda:1, mps, cpu"):
        pick_device("cuda:2")
    assert (pick_device("mps:0"), pick_device("cpu:0"), pick_device("cuda")) == ("mps", "cpu", "cuda")
