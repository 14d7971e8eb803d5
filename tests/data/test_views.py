"""Views: geometry, both croppers, color transforms against torchvision, and independence of the batch."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize
from torchvision.transforms.v2 import functional as tv

from snclr.data.datasets.base import open_dataset
from snclr.data.sampler import ViewKey, uniforms
from snclr.data.transforms import color as color
from snclr.data.transforms import crop as crops
from snclr.data.transforms.views import (
    MEAN,
    PLAIN_VIEW,
    STD,
    TRAIN_CROP,
    VIEW_GROUPS,
    ViewSettings,
    blur_widths,
    color_views,
    crop_views,
    normalize,
)
from snclr.errors import UserError
from snclr.runtime import device as threads

NOTHING = ViewSettings(crop_min=1.0, flip=0.0, jitter=0.0, grayscale=0.0, blur=0.0)


@pytest.fixture(scope="module")
def images():
    return open_dataset("demo", split="test").images[:200]


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def unit(n=6, size=32, seed=0):
    return torch.from_numpy(noise(n, 3, size, size, seed=seed)).float() / 255


def draw(n, count=crops.CROP_NUMBERS, seed=0):
    return uniforms(seed, 0, np.arange(n), 0, count)


def keyed(ids, view=0, seed=1, epoch=2):
    return ViewKey(seed, epoch, np.asarray(ids), view)


# Position of a crop


@given(height=st.integers(1, 500), width=st.integers(1, 500), low=st.floats(0.01, 1), seed=st.integers(0, 99))
@settings(max_examples=80)
def test_boxes_lie_inside_any_image(height, width, low, seed):
    top, left, h, w = crops.random_boxes(draw(20, seed=seed), height, width, (low, 1.0)).T
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()


def test_boxes_have_the_distribution_of_random_resized_crops():
    top, left, h, w = crops.random_boxes(draw(20_000), 400, 500, (0.08, 1.0)).T
    share, ratio = h * w / 200_000, w / h
    assert share.min() == pytest.approx(0.08, abs=0.005)
    assert share.max() > 0.97
    assert ratio.min() == pytest.approx(0.75, abs=0.02)
    assert ratio.max() == pytest.approx(4 / 3, abs=0.02)
    small = share < 0.5  # every shape fits, so the first try is always used
    assert np.mean(share[small] < 0.29) == pytest.approx(0.5, abs=0.02)
    assert np.mean(np.log(ratio[small])) == pytest.approx(0, abs=0.01)
    assert np.mean(ratio[small] < 1) == pytest.approx(0.5, abs=0.02)
    # The position is uniform.
    assert np.mean(top / (400 - h + 1e-9)) == pytest.approx(0.5, abs=0.02)
    assert np.mean(left / (500 - w + 1e-9)) == pytest.approx(0.5, abs=0.02)
    assert top[small].min() == 0
    assert (top + h == 400).any()


def test_an_elongated_image_falls_back_to_a_center_crop():
    boxes = crops.random_boxes(draw(50), 30, 3000, (0.9, 1.0))
    assert (boxes == [0, (3000 - 40) // 2, 30, 40]).all()
    boxes = crops.random_boxes(draw(50), 3000, 30, (0.9, 1.0))
    assert (boxes == [(3000 - 40) // 2, 0, 40, 30]).all()


# Cropping


@pytest.mark.parametrize(
    ("height", "width", "size"), [(32, 32, 32), (32, 32, 48), (96, 96, 64), (40, 70, 24), (28, 28, 32)]
)
def test_the_batch_cropper_agrees_with_pillow_to_one_gray_level(height, width, size):
    batch = noise(60, height, width, 3)  # noise is the hardest case: every overshoot is clipped
    boxes = crops.random_boxes(draw(60), height, width, (0.08, 1.0))
    flips = draw(60, 1, seed=7)[:, 0] < 0.5
    got = crops.crop_batch(batch, boxes, flips, size)
    assert got.shape == (60, 3, size, size)
    assert got.dtype == torch.uint8
    expected = np.stack([crops.crop_image(*row, size) for row in zip(batch, boxes, flips, strict=True)])
    difference = np.abs(got.permute(0, 2, 3, 1).numpy().astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert difference.mean() < 0.02
    assert flips.any()
    assert not flips.all()


def test_a_whole_crop_of_the_same_size_is_the_image_itself(images):
    whole = np.tile([0, 0, 32, 32], (len(images), 1))
    plain = crops.crop_batch(images, whole, np.zeros(len(images), bool), 32)
    mirrored = crops.crop_batch(images, whole, np.ones(len(images), bool), 32)
    assert np.array_equal(plain.permute(0, 2, 3, 1).numpy(), images)
    assert torch.equal(mirrored, plain.flip(3))


def test_flat_images_stay_flat():
    flat = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None, None], (256, 32, 32, 3))
    boxes = crops.random_boxes(draw(256), 32, 32, (0.08, 1.0))
    got = crops.crop_batch(flat, boxes, np.zeros(256, bool), 32)
    assert (got == torch.arange(256)[:, None, None, None]).all()


def test_interpolation_is_exact_in_any_order_of_summation():
    matrices = crops._axis_matrices(np.array([0, 3, 30]), np.array([96, 11, 60]), 96, 32)
    assert np.array_equal(matrices * 2**24, np.rint(matrices * 2**24))
    assert (matrices.sum(axis=2) == 1).all()
    assert np.abs(matrices).sum(axis=2).max() * 255 < 2**9  # 9 + 24 bits: any partial sum fits into a float64


def test_precomputed_matrices_equal_computed_ones():
    boxes = crops.random_boxes(draw(300), 32, 32, (0.02, 1.0))
    kept = crops._axis_matrices(boxes[:, 0], boxes[:, 2], 32, 32)
    assert np.array_equal(kept, crops._compute_matrices(boxes[:, 0], boxes[:, 2], 32, 32))
    kept[:] = 7  # the caller's own copy
    assert np.array_equal(
        crops._axis_matrices(boxes[:, 0], boxes[:, 2], 32, 32),
        crops._compute_matrices(boxes[:, 0], boxes[:, 2], 32, 32),
    )


def test_crops_do_not_depend_on_the_training_precision(images):
    crop = crop_views(images, TRAIN_CROP, 32, keyed(np.arange(200)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(crop, crop_views(images, TRAIN_CROP, 32, keyed(np.arange(200))))


# Color transforms, image by image against torchvision


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (color.brightness, tv.adjust_brightness, (0.6, 0.9, 1.0, 1.1, 1.4, 0.0)),
        (color.contrast, tv.adjust_contrast, (0.6, 0.9, 1.0, 1.1, 1.4, 0.0)),
        (color.saturation, tv.adjust_saturation, (0.6, 0.9, 1.0, 1.1, 1.4, 0.0)),
        (color.hue, tv.adjust_hue, (-0.5, -0.1, 0.0, 0.05, 0.1, 0.5)),
    ],
)
def test_jitter_is_torchvisions(ours, theirs, factors):
    x = unit()
    x[0, :, :4] = 0.5  # gray: no hue
    x[1, :, :4] = 0
    x[2, :, :4] = 1
    got = ours(x, torch.tensor(factors))
    expected = torch.stack([theirs(image, factor) for image, factor in zip(x, factors, strict=True)])
    assert torch.allclose(got, expected, atol=2e-6)


def test_gray_and_solarize_are_torchvisions():
    x = unit()
    x[0, 0, 0, 0] = 0.5
    assert torch.allclose(color.gray(x), tv.rgb_to_grayscale(x), atol=1e-6)
    assert torch.allclose(color.solarize(x), tv.solarize(x, 0.5), atol=1e-6)


@pytest.mark.parametrize(("size", "kernel"), [(32, 3), (32, 9), (48, 23)])
def test_blur_is_torchvisions(size, kernel):
    x = unit(size=size)
    sigmas = (0.015, 0.1, 0.3, 1.0, 2.0, 5.0)
    weights = color.blur_weights(torch.tensor(sigmas), kernel, size, size).float()
    expected = torch.stack([tv.gaussian_blur(image, [kernel, kernel], [s]) for image, s in zip(x, sigmas, strict=True)])
    for blur in (color.blur, color.blur_by_products):  # on the CPU and on a GPU
        assert torch.allclose(blur(x, weights), expected, atol=2e-6)


def test_the_blur_of_an_image_does_not_depend_on_its_batch():
    x = unit(n=7, size=48)
    weights = color.blur_weights(torch.linspace(0.2, 3, 7), 11, 48, 48).float()
    assert weights[0, -1] == 0 < weights[-1, -1]  # the first image alone has fewer taps
    alone = torch.cat([color.blur(x[i : i + 1], weights[i : i + 1]) for i in range(7)])
    assert torch.equal(color.blur(x, weights), alone)


def test_blur_of_a_tiny_image_keeps_its_mean():
    x = unit(n=2, size=2)
    got = color.blur(x, color.blur_weights(torch.tensor([5.0, 5.0]), 23, 2, 2).float())
    assert torch.allclose(got.mean((2, 3)), x.mean((2, 3)), atol=1e-6)


def test_blur_scales_with_the_view():
    sigma, kernel = blur_widths(np.array([0.0, 0.5, 1.0]), 224)
    assert sigma.tolist() == pytest.approx([0.1, 1.05, 2.0])
    assert kernel == 23
    sigma, kernel = blur_widths(np.array([0.0, 1.0]), 32)
    assert sigma.tolist() == pytest.approx([0.1 / 7, 2 / 7])
    assert kernel == 3
    assert [blur_widths(np.zeros(1), size)[1] for size in (64, 96, 448)] == [7, 9, 45]


# Whole views


def reference(crop, settings, seed, epoch, index, view):
    """Compute one view with torchvision from the same random numbers."""
    u = uniforms(seed, epoch, np.array([index]), view, 33)[0]
    jitter, order, gray, blur, width, solarize = u[23:29]
    strengths = 2 * u[29:33] - 1
    x = crop.float() / 255
    if jitter < settings.jitter:
        steps = [
            lambda x: tv.adjust_brightness(x, 1 + settings.brightness * strengths[0]),
            lambda x: tv.adjust_contrast(x, 1 + settings.contrast * strengths[1]),
            lambda x: tv.adjust_saturation(x, 1 + settings.saturation * strengths[2]),
            lambda x: tv.adjust_hue(x, settings.hue * strengths[3]),
        ]
        left, rest = list(range(4)), int(order * 24)
        for size in (6, 2, 1, 1):  # the factorial digits of the index of a permutation
            position, rest = divmod(rest, size)
            x = steps[left.pop(position)](x)
    if gray < settings.grayscale:
        x = tv.rgb_to_grayscale(x, 3)
    if blur < settings.blur:
        x = tv.gaussian_blur(x, [7, 7], [(0.1 + 1.9 * width) * 64 / 224])
    if solarize < settings.solarize:
        x = tv.solarize(x, 0.5)
    return tv.normalize(x, list(MEAN), list(STD))


@pytest.mark.parametrize("group", [name for name, views in VIEW_GROUPS.items() if not views[0].randaugment])
@pytest.mark.parametrize("view", [0, 1])
def test_a_view_equals_torchvisions_for_the_same_random_numbers(images, group, view):
    how = VIEW_GROUPS[group][view]
    ids = np.arange(1000, 1120)
    cut = crop_views(images[:120], how, 64, keyed(ids, view))
    got = color_views(cut, how, keyed(ids, view))
    expected = torch.stack([reference(crop, how, 1, 2, i, view) for crop, i in zip(cut, ids, strict=True)])
    # Solarization is discontinuous at one half: rounding changes a pixel or two in 100,000.
    far = ((got - expected).abs() > 2e-4).float().mean()
    assert far < 1e-4
    assert got.shape == (120, 3, 64, 64)
    assert got.dtype == torch.float32


@given(data=st.data())
@settings(max_examples=15)
def test_a_view_never_depends_on_its_batch(data):
    images = noise(24, 20, 20, 3)
    how = ViewSettings(blur=0.5, solarize=0.5, grayscale=0.3)
    ids = np.array(data.draw(st.lists(st.integers(0, 10**6), min_size=24, max_size=24)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 23), max_size=5)))

    def make(rows):
        crop = crop_views(images[rows], how, 27, keyed(ids[rows]))
        return color_views(crop, how, keyed(ids[rows]))

    whole = make(np.arange(24))
    parts = torch.cat([make(rows) for rows in np.split(np.arange(24), cuts)])
    assert torch.equal(whole, parts)
    shuffled = np.array(data.draw(st.permutations(range(24))))
    assert torch.equal(whole[shuffled], make(shuffled))


def test_a_view_never_depends_on_its_batch_at_a_training_size(images):
    how = VIEW_GROUPS["byol"][0]
    ids = np.arange(200)
    crop = crop_views(images, how, 32, keyed(ids))
    whole = color_views(crop, how, keyed(ids))
    for row in range(0, 200, 17):
        one = slice(row, row + 1)
        assert torch.equal(crop_views(images[one], how, 32, keyed(ids[one])), crop[one])
        assert torch.equal(color_views(crop[one], how, keyed(ids[one])), whole[one])


def test_a_view_never_depends_on_the_number_of_threads(images, monkeypatch):
    def make():
        crop = crop_views(images, VIEW_GROUPS["byol"][1], 48, keyed(np.arange(200)))
        return color_views(crop, VIEW_GROUPS["byol"][1], keyed(np.arange(200)))

    alone = make()
    monkeypatch.setattr(threads, "_SMALL", 0)  # use all threads
    torch.set_num_threads(3)
    try:
        assert torch.equal(alone, make())
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_a_view_never_depends_on_the_chunks_of_its_batch(images, monkeypatch, kind):
    def make():
        return color_views(crop, VIEW_GROUPS["byol"][1], keyed(np.arange(50)), memory_format=kind)

    crop = crop_views(images[:50], VIEW_GROUPS["byol"][1], 32, keyed(np.arange(50)))
    whole = make()
    assert whole.is_contiguous(memory_format=kind)
    for values in (1, 7 * 3 * 32 * 32):  # one image, and seven images with a shorter last chunk
        monkeypatch.setattr("snclr.data.transforms.views._CHUNK_VALUES", values)
        assert torch.equal(make(), whole)


def test_small_tensors_use_one_thread_and_the_setting_is_restored():
    torch.set_num_threads(3)
    try:
        with threads.threads_for(1000):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with threads.threads_for(10**8):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_each_coordinate_changes_the_view(images):
    def make(**changes):
        return crop_views(images[:8], TRAIN_CROP, 32, keyed(np.arange(8))._replace(**changes))

    base = make()
    assert torch.equal(base, make())
    for change in ({"seed": 5}, {"epoch": 5}, {"view": 1}, {"ids": np.arange(8) + 1}):
        assert (base != make(**change)).flatten(1).any(1).sum() >= 6


def test_single_image_and_batch_crops_agree(images):
    how = VIEW_GROUPS["byol"][0]
    batch = crop_views(images[:50], how, 40, keyed(np.arange(50))).int()
    for index in range(50):
        one = crop_views([images[index]], how, 40, keyed([index]))[0]
        assert (one.int() - batch[index]).abs().max() <= 1


def test_without_any_distortion_a_view_is_the_normalized_image(images):
    crop = crop_views(images, NOTHING, 32, keyed(np.arange(200)))
    got = color_views(crop, NOTHING, keyed(np.arange(200)))
    assert torch.allclose(got, normalize(images), atol=1e-6)
    assert got.mean().abs() < 1


def test_transforms_have_the_given_probabilities():
    gradient = np.broadcast_to(np.arange(0, 256, 16, dtype=np.uint8)[None, None, :, None], (1500, 16, 16, 3)).copy()
    gradient[..., 1] //= 2
    ids = np.arange(1500)

    def share(**changes):
        how = ViewSettings(**{"crop_min": 1.0, "flip": 0.0, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0, **changes})
        crop = crop_views(gradient, how, 16, keyed(ids))
        got = color_views(crop, how, keyed(ids))
        changed = (got - normalize(gradient)).abs().flatten(1).amax(1) > 1e-4
        return changed.float().mean().item()

    for name in ("flip", "jitter", "grayscale", "solarize"):
        for probability in (0.0, 0.2, 1.0):
            assert share(**{name: probability}) == pytest.approx(probability, abs=0.035)


def test_the_groups_are_byols():
    one, two = VIEW_GROUPS["byol"]
    assert (one.blur, one.solarize, two.blur, two.solarize) == (1.0, 0.0, 0.1, 0.2)
    assert (one.brightness, one.contrast, one.saturation, one.hue) == (0.4, 0.4, 0.2, 0.1)
    assert (one.jitter, one.grayscale, one.crop_min, one.flip) == (0.8, 0.2, 0.08, 0.5)


@pytest.mark.parametrize(
    "wrong", [{"flip": 1.2}, {"hue": 0.6}, {"crop_min": 0.0}, {"crop_min": 0.5, "crop_max": 0.4}, {"blur": -1}]
)
def test_invalid_view_settings_are_rejected(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ViewSettings(**wrong)


# Evaluation


@pytest.mark.parametrize(
    ("height", "width", "size"), [(300, 400, 224), (401, 257, 224), (225, 225, 224), (97, 130, 32)]
)
def test_the_evaluation_view_is_the_usual_one(height, width, size):
    image = noise(height, width, 3)
    usual = Compose([Resize(int(size * 256 / 224), InterpolationMode.BICUBIC), CenterCrop(size)])
    assert np.array_equal(crops.center_crop(image, size), np.asarray(usual(Image.fromarray(image))))


def test_small_images_are_not_cropped(images):
    assert np.array_equal(crops.center_crop(images[0], 32), images[0])
    grown = crops.center_crop(images[0], 64)
    assert np.array_equal(grown, np.asarray(Image.fromarray(images[0]).resize((64, 64), Image.Resampling.BICUBIC)))
    assert crops.center_crop(noise(1, 1, 3), 8).shape == (8, 8, 3)
    assert crops.center_crop(noise(3, 50, 3), 8).shape == (8, 8, 3)


@pytest.mark.parametrize("length", [40, 400, 1500])
def test_a_thin_image_is_resized_at_its_center_only(length, monkeypatch):
    ramp = np.repeat(np.linspace(0, 255, length).round().astype(np.uint8), 2 * 3).reshape(length, 2, 3)
    whole = np.asarray(Image.fromarray(ramp).resize((16, 8 * length), Image.Resampling.BICUBIC))
    made, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, size, *a, **k: made.append(size) or resize(image, size, *a, **k)
    )
    tall, wide = crops.center_crop(ramp, 16), crops.center_crop(ramp.swapaxes(0, 1), 16)
    assert made == [(16, 16), (16, 16)]
    center = whole[4 * length - 8 :][:16].astype(int)
    assert np.abs(tall - center).max() <= 1
    assert np.abs(wide.swapaxes(0, 1) - center).max() <= 1


def test_train_crop_is_a_crop_and_nothing_else(images):
    (got,) = crop_views([images[3]], TRAIN_CROP, 32, keyed([6], seed=4, epoch=5)).permute(0, 2, 3, 1)
    box = crops.random_boxes(uniforms(4, 5, np.array([6]), 0, crops.CROP_NUMBERS), 32, 32, (0.08, 1.0))[0]
    flip = uniforms(4, 5, np.array([6]), 0, crops.CROP_NUMBERS + 1)[0, -1] < 0.5
    assert np.array_equal(got, crops.crop_image(images[3], box, flip, 32))
    crop = crop_views(images, TRAIN_CROP, 32, keyed(np.arange(200)))
    plain = normalize(crop.permute(0, 2, 3, 1))
    assert torch.equal(color_views(crop, TRAIN_CROP, keyed(np.arange(200))), plain)


def test_the_plain_view_is_the_evaluation_view(images):
    expected = normalize(np.stack([crops.center_crop(image, 24) for image in images]))
    ids = np.arange(len(images))
    batch = crop_views(images, PLAIN_VIEW, 24, keyed(ids, view=2, seed=3, epoch=1))
    single = crop_views(list(images), PLAIN_VIEW, 24, keyed(ids, view=2, seed=3, epoch=1))
    assert torch.equal(batch, single)
    assert torch.equal(color_views(batch, PLAIN_VIEW, keyed(ids, view=2, seed=3, epoch=1)), expected)


def test_normalize_is_the_usual_one(images):
    got = normalize(images[:4])
    expected = (images[:4] / 255 - np.array(MEAN)) / np.array(STD)
    assert np.allclose(got.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    assert torch.equal(normalize(torch.from_numpy(images[:4])), got)
    fixed = images[:4].copy()
    fixed.setflags(write=False)
    assert torch.equal(normalize(fixed), got)
