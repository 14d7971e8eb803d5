"""Views: random crops with color transforms, each a pure function of (seed, epoch, image id, view number).

Stage 1 (`crop_views`) crops, resizes and flips to uint8.
Stage 2 (`color_views`) applies color transforms and normalizes a batch on the training device. torchvision's transforms
draw from a global generator, so their views would depend on workers, ranks and the batch, and not be bit-identical
after a resume.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import yaml
from torch import Tensor

from snclr.data.decode import RGBImage
from snclr.data.sampler import ViewKey, uniforms
from snclr.data.transforms import color, randaugment
from snclr.data.transforms import crop as crops
from snclr.data.transforms.compiled_color import Floats, Mask, Steps, can_compile, compiled_color, parameter_table
from snclr.errors import UserError
from snclr.runtime.device import threads_for, to_device

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


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
        for setting in fields(self):
            value, limit = getattr(self, setting.name), 0.5 if setting.name == "hue" else 1.0
            if not 0 <= value <= limit:
                raise UserError(f"the view setting {setting.name} is {value}; it must be between 0 and {limit}")
        if not 0 < self.crop_min <= self.crop_max:
            raise UserError(
                f"crop_min is {self.crop_min} and crop_max {self.crop_max}; 0 < crop_min ≤ crop_max ≤ 1 is required"
            )


VIEW_GROUPS: dict[str, tuple[ViewSettings, ViewSettings]] = {
    name: (ViewSettings(**one), ViewSettings(**other))
    for name, (one, other) in yaml.safe_load(Path(__file__).with_name("views.yaml").read_text("utf-8")).items()
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
_JITTER_OPERATIONS = (color.brightness, color.contrast, color.saturation, color.hue)


def crop_views(images: RGBImage | Sequence[RGBImage], settings: ViewSettings, size: int, key: ViewKey) -> Tensor:
    """Apply stage 1 → uint8 tensor (n, 3, size, size).

    Images of one size are an array uint8 (n, H, W, 3), which is cropped at once; images of any sizes are a list.

    >>> image = np.zeros((48, 64, 3), np.uint8)
    >>> crop_views([image], TRAIN_CROP, 32, ViewKey(seed=0, epoch=0, ids=np.array([7]), view=0)).shape
    torch.Size([1, 3, 32, 32])
    """
    if settings.center:
        crop_list = [crops.center_crop(image, size) for image in images]
    else:
        numbers = uniforms(*key, _NUMBERS)
        heights, widths = np.array([image.shape[:2] for image in images]).T
        boxes = crops.random_boxes(numbers[:, :_FLIP], heights, widths, (settings.crop_min, settings.crop_max))
        flips = numbers[:, _FLIP] < settings.flip
        if isinstance(images, np.ndarray):
            with threads_for(len(images) * 3 * size * size):
                return crops.crop_batch(images, boxes, flips, size)
        rows = zip(images, boxes, flips.tolist(), strict=True)
        crop_list = [crops.crop_image(image, box, flip, size) for image, box, flip in rows]
    return torch.from_numpy(np.stack(crop_list)).permute(0, 3, 1, 2).contiguous()


def color_views(
    images: Tensor,
    settings: ViewSettings,
    key: ViewKey,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Apply stage 2, uint8 (n, 3, S, S) → normalized float32 of the same shape, on the device of `images`.

    It is compiled on a GPU (`compiled_color`). Otherwise each transform runs on the images that it changes.
    """
    numbers = uniforms(*key, _NUMBERS + (randaugment.NUMBERS if settings.randaugment else 0))
    steps = _color_steps(settings)
    if steps is not None and can_compile(images.device):
        table = to_device(parameter_table(*_parameters(settings, numbers, images)), images.device)
        channels_last = memory_format == torch.channels_last
        colored = compiled_color(images, table, _normalization(images.device)[::2], steps, channels_last=channels_last)
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
    orders, jitter_factors, masks, weights = _parameters(settings, numbers, images)
    factors = to_device(torch.from_numpy(jitter_factors).float(), images.device)  # (n, 4)
    weights = to_device(weights, images.device)
    operation_at = _ORDERS[orders]  # (n, 4): the operation at each position
    x = images.float().div_(255)
    for position, part in itertools.product(range(4), np.flatnonzero(_jitter_limits(settings))):
        chosen = masks["jitter"] & (operation_at[:, position] == part)
        x = _change(x, chosen, _JITTER_OPERATIONS[part], factors[:, part])
    if settings.pycontrast:
        x = _change(x, masks["blur"], lambda part: color.blur(part, weights))
    if settings.randaugment:
        operations = randaugment.PYCONTRAST if settings.pycontrast else randaugment.OPERATIONS
        x = randaugment.rand_augment(x, numbers[:, _NUMBERS:], settings.randaugment, operations)
    x = _change(x, masks["gray"], lambda part: color.gray(part).repeat(1, 3, 1, 1))
    if not settings.pycontrast:
        x = _change(x, masks["blur"], lambda part: color.blur(part, weights))
    x = _change(x, masks["solarize"], color.solarize)
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


def _parameters(
    settings: ViewSettings, numbers: Floats, images: Tensor
) -> tuple[npt.NDArray[np.int64], Floats, dict[str, Mask], Tensor]:
    """Return for n images the number of the jitter's order (n,), its factors (n, 4), which images each transform
    changes (n,), and the weights of those that are blurred, float32 (rows, reach + 1).
    """
    drawn = {
        "jitter": (_JITTER, settings.jitter),
        "gray": (_GRAY, settings.grayscale),
        "blur": (_BLUR, settings.blur),
        "solarize": (_SOLARIZE, settings.solarize),
    }
    masks = {name: numbers[:, number] < probability for name, (number, probability) in drawn.items()}
    orders = (numbers[:, _ORDER] * len(_ORDERS)).astype(np.int64)
    factors = (2 * numbers[:, _STRENGTHS] - 1) * _jitter_limits(settings) + np.array([1, 1, 1, 0])
    sigma, kernel = blur_widths(numbers[masks["blur"], _SIGMA], images.shape[-1])
    return orders, factors, masks, color.blur_weights(sigma, kernel, images.shape[-2], images.shape[-1]).float()


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


def _jitter_limits(settings: ViewSettings) -> Floats:
    return np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])


def _change(x: Tensor, mask: Mask, change: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """Replace the images of x in `mask` (n,), in place unless they are all, by change(images, their parameters)."""
    if mask.all():
        return change(x, *parameters)
    if mask.any():
        rows = to_device(torch.from_numpy(np.flatnonzero(mask)), x.device)
        x.index_copy_(0, rows, change(x.index_select(0, rows), *(values[rows] for values in parameters)))
    return x


@functools.lru_cache(maxsize=4)
def _normalization(device: torch.device) -> Tensor:
    """Return (3, 3): the means, the standard deviations, and their reciprocals."""
    return to_device(torch.tensor([MEAN, STD, [1 / std for std in STD]]), device)


def _normalize_(x: Tensor) -> Tensor:
    mean, std, _ = _normalization(x.device)[..., None, None]
    return x.sub_(mean).div_(std)
