"""The color stage as a GPU compiles it: the same values as transform by transform, also if it cannot be compiled."""

import logging

import numpy as np
import pytest
import torch

from snclr.data.sampler import ViewKey
from snclr.data.transforms import compiled_color
from snclr.data.transforms.compiled_color import fused_color
from snclr.data.transforms.views import TRAIN_CROP, VIEW_GROUPS, ViewSettings, color_views, local_view

COMPILED = [name for name, pair in VIEW_GROUPS.items() if not pair[0].randaugment and name != "crops"]
SETTINGS = {
    **{f"{name} {view}": VIEW_GROUPS[name][view] for name in COMPILED for view in (0, 1)},
    "local": local_view(VIEW_GROUPS["byol"][0]),
    "no contrast": ViewSettings(contrast=0.0),
    "brightness": ViewSettings(contrast=0.0, saturation=0.0, hue=0.0, grayscale=0.0, blur=0.0),
    "solarize": ViewSettings(jitter=0.0, grayscale=0.0, blur=0.0, solarize=0.5),
}
pytestmark = pytest.mark.usefixtures("_on_the_cpu")


def pixels(count=150, size=24):
    """Return images with gray, black and white areas."""
    images = torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    for row, value in enumerate((0, 128, 255)):
        images[row::5, :, :6] = value
    return images


@pytest.fixture
def _on_the_cpu(monkeypatch):
    """Use the function on the CPU."""
    monkeypatch.setattr(compiled_color, "COMPILED_DEVICES", {"cpu"})
    monkeypatch.setattr(compiled_color, "_failed", set())


def run(settings, images, **options):
    return color_views(images, settings, ViewKey(seed=1, epoch=2, ids=np.arange(len(images)), view=0), **options)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_fused_function_has_the_values_of_the_transforms(name, monkeypatch):
    images, calls = pixels(), []

    def plain(*given, **options):
        calls.append(options)
        return fused_color(*given, **options)

    monkeypatch.setattr(compiled_color, "_compiled", lambda: plain)
    found = {
        kind: run(SETTINGS[name], images, memory_format=kind) for kind in (torch.contiguous_format, torch.channels_last)
    }
    assert [options["channels_last"] for options in calls] == [False, True]
    monkeypatch.setattr(compiled_color, "COMPILED_DEVICES", set())
    expected = run(SETTINGS[name], images)
    for kind, views in found.items():
        assert views.is_contiguous(memory_format=kind)
        assert (views - expected).abs().max() < 1e-4
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byol 1", "cifar 1"])
def test_inductor_compiles_it_to_the_same_values(name, monkeypatch):
    images = pixels(size=16)
    found = run(SETTINGS[name], images, memory_format=torch.channels_last)
    assert not compiled_color._failed
    monkeypatch.setattr(compiled_color, "COMPILED_DEVICES", set())
    assert 0 < (found - run(SETTINGS[name], images)).abs().max() < 1e-4


def test_without_a_compiler_the_transforms_run_with_one_warning(monkeypatch, caplog):
    attempts = []

    def broken(*_, **__):
        attempts.append(1)
        raise RuntimeError("no triton\nand a long trace")

    images = pixels(8)
    monkeypatch.setattr(compiled_color, "_compiled", lambda: broken)
    with caplog.at_level(logging.WARNING):
        found = [run(SETTINGS[name], images) for name in ("byol 0", "byol 0", "byol 1")]
    assert len(attempts) == 2  # a function that failed is not compiled again
    (record,) = caplog.records
    assert "cannot be compiled (RuntimeError: no triton), so it runs transform by transform" in record.message
    monkeypatch.setattr(compiled_color, "COMPILED_DEVICES", set())
    assert torch.equal(found[1], run(SETTINGS["byol 0"], images))


def test_missing_memory_is_not_taken_for_a_missing_compiler(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(compiled_color, "_compiled", lambda: full)
    with pytest.raises(torch.OutOfMemoryError):
        run(SETTINGS["byol 0"], pixels(2))
    assert not compiled_color._failed


def test_what_is_not_compiled(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("was compiled")

    monkeypatch.setattr("snclr.data.transforms.views.compiled_color", fail)
    images = pixels(2)
    for settings in (TRAIN_CROP, *VIEW_GROUPS["crops"], VIEW_GROUPS["infomin"][0], VIEW_GROUPS["randaugment"][0]):
        run(settings, images)
    assert not compiled_color.can_compile(torch.device("mps"))
    with torch._dynamo.config.patch(disable=True):  # TORCH_COMPILE_DISABLE=1
        run(SETTINGS["byol 0"], images)
    with pytest.raises(AssertionError):
        run(SETTINGS["byol 0"], images)
