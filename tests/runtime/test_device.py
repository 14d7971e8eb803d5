"""The choice of a device on simulated machines."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from snclr.errors import UserError
from snclr.runtime.device import available_devices, math_settings, pick_device


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
    with pytest.raises(UserError, match=r"choose auto or cpu$"):
        pick_device(device)


def test_gpus_are_counted_and_index_0_may_be_omitted(monkeypatch):
    machine(monkeypatch, 2, True)
    with pytest.raises(UserError, match="cuda:0, cuda:1, mps, cpu"):
        pick_device("cuda:2")
    assert (pick_device("mps:0"), pick_device("cpu:0"), pick_device("cuda")) == ("mps", "cpu", "cuda")


def state_of_math():
    backends = torch.backends
    return {
        "matmul": backends.cuda.matmul.fp32_precision,
        "convolution": backends.cudnn.conv.fp32_precision,
        "benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": (
            backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
    }  # fmt: skip


def test_math_settings_are_those_asked_for_and_end_with_the_block(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state_of_math()
    with math_settings("cuda", tf32=True, deterministic=False):
        assert state_of_math() == {**before, "matmul": "tf32", "convolution": "tf32", "benchmark": True}
    with math_settings("cuda:1", tf32=False, deterministic=True):
        found = state_of_math()
        assert (found["matmul"], found["convolution"], found["benchmark"]) == ("ieee", "ieee", False)
        assert found["deterministic"]
        assert found["attention"] == (True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with math_settings("cpu", tf32=True, deterministic=False):
        assert state_of_math() == before
    assert state_of_math() == before


def test_math_settings_have_the_names_of_torch_before_2_9(monkeypatch):
    cudnn, matmul = SimpleNamespace(allow_tf32=True, benchmark=False), SimpleNamespace(allow_tf32=False)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    with math_settings("cuda", tf32=False, deterministic=False):
        assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (False, False, True)
    with math_settings("cuda", tf32=True, deterministic=True):
        assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (True, True, False)
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (False, True, False)
