"""Views of images: random crops with distorted colours, each a pure function of (seed, epoch, image id, view number).

Two stages. Stage 1 crops, scales and mirrors to uint8: per picture (`crop_view`) or per batch (`crop_views`). Stage 2
(`colour_views`) distorts colours and normalises, batch by batch, on the training device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from snclr.data import colour, crops, randaugment
from snclr.data.decode import Picture
from snclr.data.order import Ids, uniforms
from snclr.data.threads import threads_for
from snclr.errors import UserError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """How one view is made. Probabilities and strengths; the defaults are the first of BYOL's two groups."""

    crop_min: float = 0.08
    """Least share of the picture's area in a crop."""
    crop_max: float = 1.0
    """Largest share."""
    flip: float = 0.5
    """Probability of a mirrored view."""
    jitter: float = 0.8
    """Probability of colour jitter, its four parts in random order."""
    brightness: float = 0.4
    """Jitter scales brightness by a factor in 1 ± this."""
    contrast: float = 0.4
    """The same for contrast."""
    saturation: float = 0.2
    """The same for saturation."""
    hue: float = 0.1
    """Jitter turns the hue by up to this, in turns."""
    grayscale: float = 0.2
    """Probability of a view without colour."""
    blur: float = 1.0
    """Probability of blur; its width is 0.1 to 2.0 pixels at 224, in proportion at other sizes."""
    solarize: float = 0.0
    """Probability of inverting the bright pixels."""
    randaugment: float = 0.0
    """Probability of each of RandAugment's two operations, which follow the jitter."""

    def __post_init__(self) -> None:
        limits = {"hue": 0.5}
        for setting in fields(self):
            value, limit = getattr(self, setting.name), limits.get(setting.name, 1.0)
            if not 0 <= value <= limit:
                raise UserError(f"the view setting {setting.name} is {value}; it must lie between 0 and {limit}")
        if not 0 < self.crop_min <= self.crop_max:
            raise UserError(
                f"crop_min is {self.crop_min} and crop_max {self.crop_max}; needed is 0 < crop_min ≤ crop_max ≤ 1"
            )


_INFOMIN = ViewSettings(crop_min=0.2, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, blur=0.5, randaugment=0.5)
_CROPS = ViewSettings(crop_min=0.2, jitter=0.0, grayscale=0.0, blur=0.0)
VIEW_GROUPS: dict[str, tuple[ViewSettings, ViewSettings]] = {
    # The two groups of BYOL (Grill et al., 2020), which the paper uses.
    "byol": (ViewSettings(), ViewSettings(blur=0.1, solarize=0.2)),
    # For small images (about 32 pixels): 8 % of the area would be 9 × 9 pixels, and there is no detail to blur away.
    "cifar": (ViewSettings(crop_min=0.2, blur=0.0), ViewSettings(crop_min=0.2, blur=0.0, solarize=0.2)),
    # InfoMin's (Tian et al., "What Makes for Good Views for Contrastive Learning?", 2020): stronger colours and
    # RandAugment, the same for both views. Its JigSaw branch is another loss, not a view, and is not here.
    "infomin": (_INFOMIN, _INFOMIN),
    # Where colour is not a nuisance but the subject, or there is none: crops and mirrors alone.
    "crops": (_CROPS, _CROPS),
}
TRAIN_CROP = ViewSettings(jitter=0.0, grayscale=0.0, blur=0.0)
"""A random crop and a mirror, no more: what a linear probe is trained on."""

# Which of a view's random numbers is used for what.
_FLIP = crops.CROP_NUMBERS
_JITTER, _ORDER, _GREY, _BLUR, _SIGMA, _SOLARIZE = range(_FLIP + 1, _FLIP + 7)
_STRENGTHS = slice(_FLIP + 7, _FLIP + 11)  # brightness, contrast, saturation, hue
_NUMBERS = _FLIP + 11
_ORDERS = np.array(list(itertools.permutations(range(4))))  # (24, 4)


def crop_view(
    picture: Picture, settings: ViewSettings, size: int, *, seed: int, epoch: int, index: int, view: int
) -> Picture:
    """Stage 1 for one picture uint8 (H, W, 3) of any size → uint8 (size, size, 3).

    >>> crop_view(np.zeros((48, 64, 3), np.uint8), TRAIN_CROP, 32, seed=0, epoch=0, index=7, view=0).shape
    (32, 32, 3)
    """
    numbers = uniforms(seed, epoch, np.array([index]), view, _NUMBERS)
    boxes, flips = _geometry(numbers, settings, picture.shape[0], picture.shape[1])
    return crops.crop_picture(picture, boxes[0], bool(flips[0]), size)


def crop_views(
    images: Picture, settings: ViewSettings, size: int, *, seed: int, epoch: int, ids: Ids, view: int
) -> Tensor:
    """Stage 1 for a batch in memory, uint8 (n, H, W, 3) → uint8 tensor (n, 3, size, size)."""
    numbers = uniforms(seed, epoch, ids, view, _NUMBERS)
    boxes, flips = _geometry(numbers, settings, images.shape[1], images.shape[2])
    with threads_for(len(images) * 3 * size * size):
        return crops.crop_batch(images, boxes, flips, size)


def colour_views(images: Tensor, settings: ViewSettings, *, seed: int, epoch: int, ids: Ids, view: int) -> Tensor:
    """Stage 2: uint8 (n, 3, S, S) → normalised float32 of the same shape, on the device of `images`."""
    numbers = uniforms(seed, epoch, ids, view, _NUMBERS + (randaugment.NUMBERS if settings.randaugment else 0))
    sigma, kernel = blur_widths(numbers[:, _SIGMA], images.shape[-1])
    with threads_for(images.numel()):
        x = images.float().div_(255)
        x = _jitter(x, settings, numbers)
        if settings.randaugment:
            x = randaugment.rand_augment(x, numbers[:, _NUMBERS:], settings.randaugment)
        x = _where(numbers[:, _GREY] < settings.grayscale, x, lambda part, _: colour.grey(part).repeat(1, 3, 1, 1))
        x = _where(numbers[:, _BLUR] < settings.blur, x, lambda part, rows: colour.blur(part, sigma[rows], kernel))
        x = _where(numbers[:, _SOLARIZE] < settings.solarize, x, lambda part, _: colour.solarize(part))
        return _normalise_(x)


def eval_view(picture: Picture, size: int) -> Picture:
    """Make the picture an evaluation sees: uint8 (H, W, 3) → uint8 (size, size, 3). See `crops.centre_crop`."""
    return crops.centre_crop(picture, size)


def train_crop(picture: Picture, size: int, *, seed: int, epoch: int, index: int) -> Picture:
    """Make the picture a linear probe trains on, a random crop and mirror: uint8 (H, W, 3) → uint8 (size, size, 3)."""
    return crop_view(picture, TRAIN_CROP, size, seed=seed, epoch=epoch, index=index, view=0)


def normalise(pictures: Picture | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Turn uint8 pictures (n, S, S, 3) into the encoder's input: float32 (n, 3, S, S), normalised.

    >>> normalise(np.zeros((2, 8, 8, 3), np.uint8)).shape
    torch.Size([2, 3, 8, 8])
    """
    images = pictures if isinstance(pictures, Tensor) else torch.tensor(pictures)  # copied: it may be read-only
    x = images.to(device).permute(0, 3, 1, 2).contiguous()
    return _normalise_(x.float().div_(255))


def blur_widths(numbers: Floats, size: int) -> tuple[Tensor, int]:
    """Return Gaussian widths (n,) in pixels from numbers in [0, 1), and the odd kernel length, for images of a size.

    BYOL blurs 224-pixel views by 0.1 to 2.0 pixels with 23 taps; both shrink and grow with the view.
    """
    scale = size / 224
    kernel = max(3, 2 * round(11.5 * scale - 0.5) + 1)
    return torch.from_numpy((0.1 + 1.9 * numbers) * scale), kernel


def _geometry(
    numbers: Floats, settings: ViewSettings, height: int, width: int
) -> tuple[crops.Boxes, npt.NDArray[np.bool_]]:
    area = (settings.crop_min, settings.crop_max)
    return crops.random_boxes(numbers[:, :_FLIP], height, width, area), numbers[:, _FLIP] < settings.flip


def _jitter(x: Tensor, settings: ViewSettings, numbers: Floats) -> Tensor:
    """Apply brightness, contrast, saturation and hue to the images that get jitter, each in its own order."""
    limits = np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    factors = (2 * numbers[:, _STRENGTHS] - 1) * limits + np.array([1, 1, 1, 0])
    factors_t = torch.from_numpy(factors).to(torch.float32).to(x.device)  # (n, 4)
    jittered = numbers[:, _JITTER] < settings.jitter
    order = _ORDERS[(numbers[:, _ORDER] * len(_ORDERS)).astype(np.int64)]  # (n, 4): which part comes at which turn
    for turn in range(4):
        for part, distort in enumerate((colour.brightness, colour.contrast, colour.saturation, colour.hue)):
            if limits[part] > 0:
                chosen = jittered & (order[:, turn] == part)
                x = _where(chosen, x, functools.partial(_distort, distort, factors_t[:, part]))
    return x


def _distort(distort: Callable[[Tensor, Tensor], Tensor], factors: Tensor, images: Tensor, rows: Tensor) -> Tensor:
    return distort(images, factors[rows.to(factors.device)])


def _where(chosen: npt.NDArray[np.bool_], x: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Replace the chosen images of x (changed in place) by change(those images, their row numbers)."""
    rows = torch.from_numpy(np.flatnonzero(chosen))
    if len(rows):
        place = rows.to(x.device)
        x.index_copy_(0, place, change(x.index_select(0, place), rows))
    return x


def _normalise_(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) for values in (MEAN, STD))
    return x.sub_(mean).div_(std)
