"""Views: random crops with color transforms, each a pure function of (seed, epoch, image id, view number).

Stage 1 crops, resizes and flips to uint8, per image (`crop_view`) or per batch (`crop_views`). Stage 2 (`color_views`)
applies color transforms and normalizes a batch on the training device. torchvision's transforms draw from a global
generator, so their views would depend on workers, ranks and the batch, and not be bit-identical after a resume.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from snclr.data.decode import RGBImage
from snclr.data.sampler import Ids
from snclr.data.transforms import color, randaugment
from snclr.data.transforms import crop as crops
from snclr.data.transforms.compiled_color import can_compile, compiled_color
from snclr.data.transforms.fused_color import Steps, parameter_table
from snclr.data.transforms.rng import uniforms
from snclr.errors import UserError
from snclr.runtime.device import threads_for, to_device

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """Probabilities and strengths of one view; the defaults are those of BYOL's first view."""

    crop_min: float = 0.08
    """Minimum area of a crop, as a share of the image."""
    crop_max: float = 1.0
    """Maximum area of a crop."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter: float = 0.8
    """Probability of color jitter: brightness, contrast, saturation and hue in random order."""
    brightness: float = 0.4
    """Range of the brightness factor, 1 ± this."""
    contrast: float = 0.4
    """Range of the contrast factor."""
    saturation: float = 0.2
    """Range of the saturation factor."""
    hue: float = 0.1
    """Maximum hue shift, as a fraction of the color circle."""
    grayscale: float = 0.2
    """Probability of conversion to grayscale."""
    blur: float = 1.0
    """Probability of Gaussian blur with sigma 0.1 to 2.0 at 224 pixels, in proportion at other sizes."""
    solarize: float = 0.0
    """Probability of solarization."""
    randaugment: float = 0.0
    """Probability of each of the two operations of RandAugment, applied after the jitter."""
    pycontrast: bool = False
    """Use the strengths and the order of InfoMin's code (PyContrast): jitter, blur, RandAugment, grayscale."""
    center: bool = False
    """Take the center crop of evaluation instead of a random crop."""

    def __post_init__(self) -> None:
        limits = {"hue": 0.5}
        for setting in fields(self):
            value, limit = getattr(self, setting.name), limits.get(setting.name, 1.0)
            if not 0 <= value <= limit:
                raise UserError(f"the view setting {setting.name} is {value}; it must be between 0 and {limit}")
        if not 0 < self.crop_min <= self.crop_max:
            raise UserError(
                f"crop_min is {self.crop_min} and crop_max {self.crop_max}; 0 < crop_min ≤ crop_max ≤ 1 is required"
            )


# The color distortion of SimCLR (Chen et al., 2020) at strength 1, and at strength 0.5 as in its command for CIFAR-10.
_SIMCLR = ViewSettings(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, blur=0.5)
_SIMCLR_CIFAR = ViewSettings(saturation=0.4, blur=0.0)
_RANDAUGMENT = replace(_SIMCLR, crop_min=0.2, randaugment=0.5)
_INFOMIN = replace(_RANDAUGMENT, pycontrast=True)
# MoCo v1's (He et al., 2020), which always jitters; MoCo v2's (Chen et al., 2020), which also blurs.
_MOCO = ViewSettings(crop_min=0.2, jitter=1.0, saturation=0.4, hue=0.4, blur=0.0)
_MOCOV2 = ViewSettings(crop_min=0.2, saturation=0.4, blur=0.5)
# PIRL's image, and the view that is cut into patches (Misra and van der Maaten, 2020).
_PIRL = ViewSettings(jitter=1.0, saturation=0.4, hue=0.2, blur=0.0)
_CROPS = ViewSettings(crop_min=0.2, jitter=0.0, grayscale=0.0, blur=0.0)
VIEW_GROUPS: dict[str, tuple[ViewSettings, ViewSettings]] = {
    # The augmentations of BYOL's two views (Grill et al., 2020), which the paper uses.
    "byol": (ViewSettings(), ViewSettings(blur=0.1, solarize=0.2)),
    # For small images (about 32 pixels): 8 % of the area would be 9 × 9 pixels, and blur would remove all detail.
    "cifar": (ViewSettings(crop_min=0.2, blur=0.0), ViewSettings(crop_min=0.2, blur=0.0, solarize=0.2)),
    "simclr": (_SIMCLR, _SIMCLR),
    "simclr-cifar": (_SIMCLR_CIFAR, _SIMCLR_CIFAR),
    "moco": (_MOCO, _MOCO),
    "mocov2": (_MOCOV2, _MOCOV2),
    "pirl": (_PIRL, replace(_PIRL, crop_min=0.6)),
    # InfoMin's (Tian et al., "What Makes for Good Views for Contrastive Learning?", 2020): stronger colors and
    # RandAugment, the same for both views, without the JigSaw branch.
    "infomin": (_INFOMIN, _INFOMIN),
    # The same with torchvision's strengths of RandAugment, which have both signs.
    "randaugment": (_RANDAUGMENT, _RANDAUGMENT),
    # For images whose color matters or that have none: crops and flips only.
    "crops": (_CROPS, _CROPS),
}
TRAIN_CROP = ViewSettings(jitter=0.0, grayscale=0.0, blur=0.0)
"""A random crop and flip, for linear probes and fine-tuning."""
PLAIN_VIEW = ViewSettings(center=True, jitter=0.0, grayscale=0.0, blur=0.0)
"""The image as in evaluation: the center crop, without color changes."""

_LOCAL_MIN = 0.05  # smallest area of a local crop, in SwAV and DINO
LOCAL_BLUR = 0.5  # probability of blur in a local crop, in SwAV and DINO


def local_view(first: ViewSettings) -> ViewSettings:
    """Return the settings of a local crop (multi-crop): the colors of the first view, a smaller part of the image."""
    low, high, blur = min(_LOCAL_MIN, first.crop_min), first.crop_min, min(first.blur, LOCAL_BLUR)
    return replace(first, crop_min=low, crop_max=high, blur=blur, solarize=0.0)


# Values of the images that a CPU transforms at once, on one thread: they stay in its cache from one transform to the
# next, and no thread waits for another, which is slow while the workers use all cores. Larger images are transformed
# one by one: no copies of the images that a transform changes, and temporary tensors are reused by malloc.
_CHUNK_VALUES = 2**20
_LARGE_VALUES = 2**17
# Positions of the random numbers of a view.
_FLIP = crops.CROP_NUMBERS
_JITTER, _ORDER, _GRAY, _BLUR, _SIGMA, _SOLARIZE = range(_FLIP + 1, _FLIP + 7)
_STRENGTHS = slice(_FLIP + 7, _FLIP + 11)  # brightness, contrast, saturation, hue
_NUMBERS = _FLIP + 11
_ORDERS = np.array(list(itertools.permutations(range(4))))  # (24, 4)


def crop_view(
    image: RGBImage, settings: ViewSettings, size: int, *, seed: int, epoch: int, index: int, view: int
) -> RGBImage:
    """Apply stage 1 to one image, uint8 (H, W, 3) → uint8 (size, size, 3).

    >>> crop_view(np.zeros((48, 64, 3), np.uint8), TRAIN_CROP, 32, seed=0, epoch=0, index=7, view=0).shape
    (32, 32, 3)
    """
    ids = np.array([index])
    crop: RGBImage = crop_images([image], settings, size, seed=seed, epoch=epoch, ids=ids, view=view)[0]
    return crop


def crop_images(
    images: Sequence[RGBImage], settings: ViewSettings, size: int, *, seed: int, epoch: int, ids: Ids, view: int
) -> RGBImage:
    """Apply `crop_view` to n images of any sizes → uint8 (n, size, size, 3); faster than one by one."""
    if settings.center:
        return np.stack([crops.center_crop(image, size) for image in images])
    numbers = uniforms(seed, epoch, ids, view, _NUMBERS)
    out = np.empty((len(images), size, size, 3), np.uint8)
    shapes = np.array([image.shape[:2] for image in images])
    for shape in np.unique(shapes, axis=0):
        rows = np.flatnonzero((shapes == shape).all(axis=1))
        boxes, flips = _geometry(numbers[rows], settings, int(shape[0]), int(shape[1]))
        for row, box, flip in zip(rows.tolist(), boxes, flips.tolist(), strict=True):
            out[row] = crops.crop_image(images[row], box, flip, size)
    return out


def crop_views(
    images: RGBImage, settings: ViewSettings, size: int, *, seed: int, epoch: int, ids: Ids, view: int
) -> Tensor:
    """Apply stage 1 to a batch, uint8 (n, H, W, 3) → uint8 tensor (n, 3, size, size)."""
    if settings.center:
        return torch.from_numpy(np.stack([crops.center_crop(image, size) for image in images])).permute(0, 3, 1, 2)
    numbers = uniforms(seed, epoch, ids, view, _NUMBERS)
    boxes, flips = _geometry(numbers, settings, images.shape[1], images.shape[2])
    with threads_for(len(images) * 3 * size * size):
        return crops.crop_batch(images, boxes, flips, size)


def color_views(
    images: Tensor,
    settings: ViewSettings,
    *,
    seed: int,
    epoch: int,
    ids: Ids,
    view: int,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Apply stage 2, uint8 (n, 3, S, S) → normalized float32 of the same shape, on the device of `images`.

    It is compiled on a GPU (`compiled_color`). Otherwise each transform runs on the images that it changes.
    """
    numbers = uniforms(seed, epoch, ids, view, _NUMBERS + (randaugment.NUMBERS if settings.randaugment else 0))
    steps = _color_steps(settings)
    if steps is not None and can_compile(images.device):
        table = to_device(_parameter_table(settings, numbers, images), images.device)
        channels_last = memory_format == torch.channels_last
        colored = compiled_color(images, table, _mean_and_scale(images.device), steps, channels_last=channels_last)
        if colored is not None:
            return colored
    if images.device.type != "cpu":
        return _color_rows(images, settings, numbers).contiguous(memory_format=memory_format)
    out = torch.empty(images.shape, memory_format=memory_format)
    values = images.shape[1:].numel()
    chunk = 1 if values >= _LARGE_VALUES else max(1, _CHUNK_VALUES // values)
    with threads_for(images[:chunk].numel()):
        for start in range(0, len(images), chunk):
            rows = slice(start, start + chunk)
            out[rows] = _color_rows(images[rows], settings, numbers[rows])
    return out


def _color_rows(images: Tensor, settings: ViewSettings, numbers: Floats) -> Tensor:
    """Apply each transform of stage 2 to the images that it changes."""
    chosen = _chosen_rows(settings, numbers)
    weights = _blur_weights(numbers[chosen["blur"]], images)
    factors = torch.from_numpy(_jitter_factors(settings, numbers)).float()  # (n, 4)
    # Two copies for all row numbers and all parameters.
    rows_t = to_device(torch.from_numpy(np.concatenate(list(chosen.values()))), images.device)
    rows = dict(zip(chosen, torch.split(rows_t, [len(part) for part in chosen.values()]), strict=True))
    table = to_device(torch.cat([factors.flatten(), weights.flatten()]), images.device)
    factors = table[: factors.numel()].view(factors.shape)
    weights = table[factors.numel() :].view(weights.shape)
    x = images.float().div_(255)
    for position, part in itertools.product(range(4), range(4)):
        if f"{position}.{part}" in rows:
            x = _change(x, rows[f"{position}.{part}"], functools.partial(_distort, part, factors[:, part]))
    if settings.pycontrast:
        x = _change(x, rows["blur"], lambda part, _: color.blur(part, weights))
    if settings.randaugment:
        operations = randaugment.PYCONTRAST if settings.pycontrast else randaugment.OPERATIONS
        x = randaugment.rand_augment(x, numbers[:, _NUMBERS:], settings.randaugment, operations)
    x = _change(x, rows["gray"], lambda part, _: color.gray(part).repeat(1, 3, 1, 1))
    if not settings.pycontrast:
        x = _change(x, rows["blur"], lambda part, _: color.blur(part, weights))
    x = _change(x, rows["solarize"], lambda part, _: color.solarize(part))
    return _normalize_(x)


def _color_steps(settings: ViewSettings) -> Steps | None:
    """Return the steps to compile; None if a view is only normalized, or has RandAugment.

    RandAugment rounds to gray levels, and some of its operations amplify the difference of one level, so that views on
    a GPU would differ from those on a CPU.
    """
    jitter = settings.jitter > 0 and bool(_jitter_limits(settings).any())
    steps = Steps(
        jitter=jitter,
        contrast=jitter and settings.contrast > 0,
        gray=settings.grayscale > 0,
        blur=settings.blur > 0,
        solarize=settings.solarize > 0,
    )
    return None if steps == Steps() or settings.randaugment or settings.pycontrast else steps


def _parameter_table(settings: ViewSettings, numbers: Floats, images: Tensor) -> Tensor:
    """Return the parameters of all transforms for `fused_color`, one row per image."""
    gray, blurred, solarize = (
        numbers[:, number] < probability
        for number, probability in ((_GRAY, settings.grayscale), (_BLUR, settings.blur), (_SOLARIZE, settings.solarize))
    )
    return parameter_table(
        orders=(numbers[:, _ORDER] * len(_ORDERS)).astype(np.int64),
        jittered=numbers[:, _JITTER] < settings.jitter,
        factors=_jitter_factors(settings, numbers),
        gray=gray,
        solarize=solarize,
        blurred=blurred,
        weights=_blur_weights(numbers[blurred], images),
    )


def _blur_weights(numbers: Floats, images: Tensor) -> Tensor:
    """Return the weights of the images with these numbers, float32 (n, reach + 1)."""
    sigma, kernel = blur_widths(numbers[:, _SIGMA], images.shape[-1])
    return color.blur_weights(sigma, kernel, images.shape[-2], images.shape[-1]).float()


def normalize(images: RGBImage | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Convert images uint8 (n, S, S, 3) to encoder inputs, normalized float32 (n, 3, S, S).

    >>> normalize(np.zeros((2, 8, 8, 3), np.uint8)).shape
    torch.Size([2, 3, 8, 8])
    """
    tensor = images if isinstance(images, Tensor) else torch.tensor(images)  # a copy: the array may be read-only
    x = to_device(tensor, device).permute(0, 3, 1, 2).contiguous()
    return _normalize_(x.float().div_(255))


def blur_widths(numbers: Floats, size: int) -> tuple[Tensor, int]:
    """Return sigma (n,) in pixels from numbers in [0, 1), and the odd kernel size, for views of `size` pixels.

    BYOL uses sigma 0.1 to 2.0 and 23 taps at 224 pixels; both scale with the view.
    """
    scale = size / 224
    kernel = max(3, 2 * round(11.5 * scale - 0.5) + 1)
    return torch.from_numpy((0.1 + 1.9 * numbers) * scale), kernel


def _geometry(
    numbers: Floats, settings: ViewSettings, height: int, width: int
) -> tuple[crops.Boxes, npt.NDArray[np.bool_]]:
    area = (settings.crop_min, settings.crop_max)
    return crops.random_boxes(numbers[:, :_FLIP], height, width, area), numbers[:, _FLIP] < settings.flip


def _jitter_limits(settings: ViewSettings) -> Floats:
    return np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])


def _jitter_factors(settings: ViewSettings, numbers: Floats) -> Floats:
    """Return the strength of brightness, contrast, saturation and hue of each image (n, 4)."""
    factors: Floats = (2 * numbers[:, _STRENGTHS] - 1) * _jitter_limits(settings) + np.array([1, 1, 1, 0])
    return factors


def _chosen_rows(settings: ViewSettings, numbers: Floats) -> dict[str, npt.NDArray[np.int64]]:
    """Return the images that each transform changes: "1.3" is hue as the second operation of the color jitter."""
    jittered = numbers[:, _JITTER] < settings.jitter
    order = _ORDERS[(numbers[:, _ORDER] * len(_ORDERS)).astype(np.int64)]  # (n, 4): the operation at each position
    limits = _jitter_limits(settings)
    chosen = {
        f"{position}.{part}": np.flatnonzero(jittered & (order[:, position] == part))
        for position, part in itertools.product(range(4), range(4))
        if limits[part] > 0
    }
    for name, number in (("gray", _GRAY), ("blur", _BLUR), ("solarize", _SOLARIZE)):
        probability = settings.grayscale if name == "gray" else getattr(settings, name)
        chosen[name] = np.flatnonzero(numbers[:, number] < probability)
    return chosen


def _distort(part: int, factors: Tensor, images: Tensor, rows: Tensor) -> Tensor:
    return (color.brightness, color.contrast, color.saturation, color.hue)[part](images, factors[rows])


def _change(x: Tensor, rows: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Replace the images `rows` of x, in place unless they are all, by change(images, rows)."""
    if len(rows) == len(x):
        return change(x, rows)
    if len(rows):
        x.index_copy_(0, rows, change(x.index_select(0, rows), rows))
    return x


@functools.lru_cache(maxsize=4)
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std


@functools.lru_cache(maxsize=4)
def _mean_and_scale(device: torch.device) -> Tensor:
    return to_device(torch.tensor([MEAN, [1 / std for std in STD]]), device)


def _normalize_(x: Tensor) -> Tensor:
    mean, std = _mean_and_std(x.device)
    return x.sub_(mean).div_(std)
