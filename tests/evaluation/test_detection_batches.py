from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snclr.data.decode import BadImage
from snclr.data.workers import read_items
from snclr.errors import UserError
from snclr.evaluation.detection.batches import (
    DetectionSteps,
    draw_geometry,
    load_image,
    make_sample,
    scaled_size,
)
from snclr.evaluation.detection.coco import CocoObject, CocoSet, open_coco
from snclr.evaluation.detection.settings import DetectSettings, learning_rate, resolve
from tests.helpers import tiny_coco

SMALL = DetectSettings(iterations=10, batch_size=2, short_side=(48, 64), long_side=90, seed=5)


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> CocoSet:
    return open_coco(tiny_coco.write(tmp_path_factory.mktemp("set")))[0]


# ---- the schedule


def test_the_1x_recipe_is_the_standard_schedule():
    s = resolve("1x")
    assert (s.iterations, s.batch_size, s.peak_lr, s.milestones, s.warmup) == (90_000, 16, 0.02, (60_000, 80_000), 1000)
    assert (s.weight_decay, s.momentum, s.long_side, s.width, s.rois, s.anchor) == (1e-4, 0.9, 1333, 256, 512, 32)
    assert s.short_sides == (640, 672, 704, 736, 768, 800)
    assert resolve("2x").milestones == (120_000, 160_000)


def test_learning_rate_scales_with_the_batch_and_warm_up_with_the_schedule():
    s = resolve("1x", batch_size=4, iterations=90, lr=None)
    assert s.peak_lr == pytest.approx(0.005)
    rates = [learning_rate(step, s) for step in range(90)]
    assert rates[0] == pytest.approx(0.005 * 0.001)
    assert rates[9] == pytest.approx(0.005)
    assert rates[59] == pytest.approx(0.005)
    assert rates[60] == pytest.approx(0.0005)
    assert rates[80] == pytest.approx(0.00005)
    assert sorted(rates[:10]) == rates[:10]


@pytest.mark.parametrize(
    "wrong",
    [{"iterations": 0}, {"lr": -1.0}, {"lr": float("nan")}, {"short_side": (800, 640)}, {"long_side": 300}],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(UserError):
        resolve("1x", **wrong)


def test_unknown_recipes_and_sizes_are_refused():
    with pytest.raises(UserError, match="choose one of 1x, 2x, cpu"):
        resolve("3x")
    with pytest.raises(UserError, match="640-800"):
        resolve("1x", short_side="big")


# ---- samples


@settings(max_examples=40)
@example(width=1, height=1601, short=32, long=800)  # the short side would be below one pixel
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(32, 800), st.integers(800, 1400))
def test_scaled_sizes_keep_the_aspect_ratio_and_the_limits(width, height, short, long):
    w, h = scaled_size(width, height, short, long)
    assert min(w, h) <= short
    assert max(w, h) <= long
    assert min(w, h) == short or max(w, h) == long
    scale = max(w, h) / max(width, height) if max(w, h) == long else min(w, h) / min(width, height)
    assert w == pytest.approx(max(1, width * scale), abs=1)
    assert h == pytest.approx(max(1, height * scale), abs=1)


@settings(max_examples=25)
@given(
    st.integers(0, 30), st.integers(0, 20), st.integers(8, 30), st.integers(40, 140), st.integers(40, 140),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_box_mask_and_pixels_are_transformed_alike(x, y, side, width, height, flip, as_rle):
    made = tiny_coco.disc(1, 1, x, y, side, size=(72, 64)) if as_rle else tiny_coco.square(1, 1, x, y, side)
    found = CocoObject(3, (x, y, side, side), made["segmentation"], side * side, False)
    pixels = np.zeros((64, 72, 3), np.uint8)
    pixels[y : y + side, x : x + side] = 255
    s = make_sample(pixels, [found], {3: 1}, number=0, size=(width, height), flip=flip)
    assert s.image.shape == (3, height, width)
    assert s.masks.shape == (1, height, width)
    x1, y1, x2, y2 = s.boxes[0].tolist()
    rows, columns = np.nonzero(s.masks[0].numpy())
    tolerance = 1.5 + max(width / 72, height / 64) * 1.01
    around = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert np.abs(np.array(around) - np.array([x1, y1, x2, y2])).max() <= tolerance
    bright = np.nonzero(s.image[0].numpy() > 127)
    assert abs(bright[1].min() - x1) <= tolerance
    assert abs(bright[1].max() + 1 - x2) <= tolerance


def test_crowds_and_empty_masks_are_left_out_of_training():
    pixels = np.zeros((64, 72, 3), np.uint8)
    dot = tiny_coco.disc(1, 1, 10, 10, 2, size=(72, 64))["segmentation"]
    crowd = CocoObject(3, (0, 0, 30, 30), tiny_coco.square(1, 1, 0, 0, 30)["segmentation"], 900, True)
    small = CocoObject(3, (11.2, 11.2, 0.1, 0.1), dot, 1, False)
    s = make_sample(pixels, [crowd, small], {3: 1}, number=0, size=(9, 8), flip=False)
    assert s.boxes.shape == (0, 4)
    assert s.masks.shape == (0, 8, 9)
    assert s.labels.dtype == torch.int64


def test_a_step_does_not_depend_on_the_world_size(train):
    whole = DetectionSteps(train, SMALL)[3]
    halves = [DetectionSteps(train, SMALL, rank, 2)[3] for rank in range(2)]
    parts = [sample for half in halves for sample in half.samples]
    sent = pickle.loads(pickle.dumps(DetectionSteps(train, SMALL)))  # as to a worker
    (ahead,) = read_items(sent, 3, 4, workers=0)
    for other in (parts, ahead.samples):
        assert [s.number for s in other] == [s.number for s in whole.samples]
        for a, b in zip(whole.samples, other, strict=True):
            assert tuple(a.seeds) == tuple(b.seeds)
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("image", "boxes", "masks"))
    assert len({s.seeds for s in whole.samples}) == 2


def test_sizes_and_flips_vary_between_epochs():
    drawn = [draw_geometry(SMALL, epoch, number) for epoch in range(30) for number in range(20)]
    assert {side for side, _ in drawn} == set(SMALL.short_sides)
    assert 0.4 < np.mean([flip for _, flip in drawn]) < 0.6


def test_an_unreadable_image_is_replaced_and_reported(tmp_path):
    folder = tiny_coco.write(tmp_path)
    coco = open_coco(folder)[0]
    steps = DetectionSteps(coco, SMALL)
    wanted = next(step for step in range(9) if 1 in [sample.number for sample in steps[step].samples])
    (folder / "train2017" / "002.png").write_bytes(b"no image")
    batch = steps[wanted]
    assert len(batch.samples) == 2
    assert "known format" in batch.bad[1]
    assert 1 not in [sample.number for sample in batch.samples]
    for path in (folder / "train2017").iterdir():
        path.write_bytes(b"")
    assert steps[wanted].samples == []


def test_a_file_with_another_size_than_annotated_is_refused(tmp_path):
    folder = tiny_coco.write(tmp_path)
    (Path(folder) / "train2017" / "001.png").write_bytes(_png(10, 12))
    coco = open_coco(folder)[0]
    with pytest.raises(BadImage, match="the file has 12×10 pixels, its annotation 72×64"):
        load_image(coco, 0)


def _png(height: int, width: int) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()
