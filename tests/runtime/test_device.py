"""Which device a word means, on machines that are made up here."""

from __future__ import annotations

import pytest
import torch

from snclr.errors import UserError
from snclr.runtime.device import devices_here, pick_device


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("gpus", "mps", "auto", "here"),
    [(0, False, "cpu", ["cpu"]), (0, True, "mps", ["mps", "cpu"]), (2, False, "cuda", ["cuda:0", "cuda:1", "cpu"])],
)
def test_auto_is_the_best_there_is_and_all_that_is_here_is_accepted(monkeypatch, gpus, mps, auto, here):
    machine(monkeypatch, gpus, mps)
    assert devices_here() == here
    assert pick_device("auto") == auto
    assert [pick_device(name) for name in here] == here
    assert pick_device(auto) == auto


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "meta", "xla", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_what_is_not_here_is_refused_with_what_is(monkeypatch, device):
    machine(monkeypatch, 0, False)
    with pytest.raises(UserError, match=r"give auto, or one that is: cpu$"):
        pick_device(device)


def test_a_gpu_too_many_and_other_ways_to_say_the_first(monkeypatch):
    machine(monkeypatch, 2, True)
    with pytest.raises(UserError, match="cuda:0, cuda:1, mps, cpu"):
        pick_device("cuda:2")
    assert (pick_device("mps:0"), pick_device("cpu:0"), pick_device("cuda")) == ("mps", "cpu", "cuda")
