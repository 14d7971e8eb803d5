"""The checks of `snclr doctor` find the faults that they are for."""

import shutil
import warnings
from collections import namedtuple

import pytest
import torch

from snclr.diagnostics import machine, methods, recipe, runs, suite
from snclr.diagnostics.setup import CheckRow, Setup, tiny_batches, tiny_config
from snclr.errors import UserError
from snclr.train import pretrain_task
from snclr.train.build import build_task


@pytest.fixture
def setup(tmp_path):
    return Setup("cpu", 2, "demo", True, tmp_path)


def test_a_value_that_is_not_finite_fails():
    assert CheckRow.at_most("b", float("nan"), 1.0, advice="").outcome == "failed"
    assert CheckRow.at_most("b", float("inf"), 1.0, advice="").outcome == "failed"
    assert CheckRow.at_most("b", 1.0, 1.0, advice="").outcome == "passed"


def test_a_driver_that_torch_cannot_use_fails():
    assert machine.driver_row("550.54", "12.4", True).outcome == "passed"
    assert machine.driver_row("470.82", "12.4", False).outcome == "failed"
    assert machine.driver_row(None, "12.4", False).outcome == "not applicable"


def test_little_shared_memory_fails(setup, monkeypatch):
    usage = namedtuple("usage", "total used free")
    large = Setup("cpu", 8, "resnet50-imagenet", True, setup.folder)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))  # docker's default
    row = machine.shared_memory_row(large)
    assert row.outcome == "failed"
    # 8 ranks × 8 workers × 2 batches × 512 images × 2 views × 3 × 224² bytes
    assert f"{8 * 8 * 2 * 512 * 2 * 3 * 224**2 / 1e6:,.0f} MB" in row.limit
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(0, 0, 10**12))
    assert machine.shared_memory_row(large).outcome == "passed"


@pytest.mark.parametrize("size", [31, 32, 33, 95, 96, 700, 4095, 4096, 10**6])
def test_the_largest_batch_is_found(size):
    tried = []

    def fits(images):
        tried.append(images)
        return images <= size

    expected = min(size // recipe.GRAIN * recipe.GRAIN, recipe.MOST)
    assert recipe.largest_batch(fits) == expected
    assert len(tried) <= 15


def test_waits_are_counted_by_line_and_other_warnings_are_not():
    with methods.recorded_waits() as waits:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert sum(waits.values()) == 3
    assert len(waits) == 1


def test_a_step_that_ignores_overflow_fails(setup, monkeypatch):
    first, second = methods.check_overflow(setup)
    assert (first.outcome, second.outcome) == ("passed", "not applicable")
    loose = lambda step, loss, ids, **_: (loss.detach(), 1.0)  # noqa: E731
    monkeypatch.setattr(pretrain_task, "check_finite", loose)
    first, _ = methods.check_overflow(setup)
    assert first.outcome == "failed"
    assert first.value == "not stopped, weights changed"


def test_a_step_in_fp16_is_skipped_and_lowers_the_loss_scale():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu")])
    fabric.launch()
    batches = list(tiny_batches("snclr", 32))
    task = build_task(tiny_config(precision="16", device="cpu"), fabric)
    assert methods.check_loss_scale(task, batches, "").outcome == "passed"
    task.fabric.strategy.precision.scaler._enabled = False  # nothing scales, so nothing overflows or is skipped
    scale = {"scale": 1.0}
    task.fabric.strategy.precision.state_dict = lambda: scale
    task.fabric.strategy.precision.load_state_dict = lambda _: None
    assert methods.check_loss_scale(task, batches, "").value.startswith("weights changed")


def test_half_precision_of_a_gpu_is_within_its_limit_and_a_wrong_gradient_is_not():
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    found = methods.train_steps(build_task(tiny_config(device="cpu"), fabric))
    expected = methods.reference("snclr")
    assert 1e-3 < methods.difference(found, expected) < methods.LIMITS["bf16"]
    assert methods.difference(-found, expected) > methods.LIMITS["bf16"]


def test_a_resume_that_differs_in_one_bit_fails(setup, monkeypatch):
    name, read = "optimizer/0/momentum_buffer", runs.end_state

    def end_state(run):
        tensors = read(run)
        if run.name == "resumed":
            tensors[name] = torch.nextafter(tensors[name], torch.tensor(torch.inf))
        return tensors

    last = f"checkpoints/step-{runs.STEPS:010}"
    folder = setup.folder
    monkeypatch.setattr(runs, "end_state", end_state)
    monkeypatch.setattr(
        runs, "run_snclr", lambda *_: shutil.copytree(folder / "whole" / last, folder / "resumed" / last)
    )
    (row,) = runs.check_resume(setup)
    assert row.outcome == "failed"
    assert row.details == (name,)


def test_an_error_in_a_check_is_a_failed_row(setup, monkeypatch):
    def broken(_):
        yield CheckRow.at_most("first", 0.0, 1.0, advice="")
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setitem(suite.CHECKS, "kernels", broken)
    first, second = suite.run_group("kernels", setup)
    assert first.outcome == "passed"
    assert second.outcome == "failed"
    assert second.value == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_the_number_of_ranks():
    assert suite.count_ranks("cpu", "auto") == 2
    assert suite.count_ranks("mps", "auto") == 1
    assert suite.count_ranks("cpu", "3") == 3
    with pytest.raises(UserError, match="at least 1"):
        suite.count_ranks("cpu", "0")


def test_one_device_has_no_check_of_several_ranks(setup):
    alone = Setup("cpu", 1, "demo", True, setup.folder)
    (row,) = runs.check_ranks(alone)
    assert row.outcome == "not applicable"
