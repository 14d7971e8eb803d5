"""Training samples as pure functions of (seed, step, image): order, size and flips.

The pixels do not depend on the number of workers or ranks, nor on a resume. An image is uint8 (3, H, W) with boxes
(n, 4) as x1, y1, x2, y2, labels (n,) from 1 and masks (n, H, W).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.decode import BadImage, RGBImage, decode
from snclr.data.sampler import batch_ids, uniforms, with_replacements
from snclr.evaluation.detection.coco import CocoObject, CocoSet, rle_runs
from snclr.evaluation.detection.settings import DetectSettings

GEOMETRY, SAMPLING = 0, 1
"""Streams of random numbers per image: size and flip, and the sampling of anchors and regions."""
_REPLACEMENT_TRIES = 20
_SEEDS = 2**31


class Sample(NamedTuple):
    """One image at its training size, and its objects."""

    number: int
    image: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    seeds: tuple[int, int]
    """Seeds for the sampling of anchors and of regions."""


class StepSamples(NamedTuple):
    """This rank's samples of a step, and the unreadable images with the reasons."""

    step: int
    samples: list[Sample]
    """Empty if an image and all replacements tried for it are unreadable: the task then stops."""
    bad: dict[int, str]


def scaled_size(width: int, height: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Return width and height with the given short side, or smaller if the long side would exceed its limit.

    >>> scaled_size(640, 480, 800, 1333), scaled_size(1000, 250, 800, 1333)
    ((1067, 800), (1333, 333))
    """
    scale = min(short_side / min(width, height), long_side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def load_image(coco: CocoSet, number: int) -> RGBImage:
    """Load an image, uint8 (H, W, 3); raise BadImage if it is unreadable or its size differs from the annotations."""
    pixels, image = decode(coco.path(number)), coco.images[number]
    height, width = pixels.shape[:2]
    if (height, width) != (image.height, image.width):
        raise BadImage(f"the file has {width}×{height} pixels, its annotation {image.width}×{image.height}")
    return pixels


def resize_image(pixels: RGBImage, size: tuple[int, int]) -> Tensor:
    """Scale to (width, height) with antialiasing: uint8 (3, H, W)."""
    scaled = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def object_mask(segmentation: Any, width: int, height: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Rasterize the mask of an object in an image of width × height at another size (width, height): uint8 (H, W).

    Polygons are scaled before rasterization, so that small objects keep their outline; an RLE uses nearest pixels.
    """
    from pycocotools import mask as coco_mask

    new_width, new_height = size
    if isinstance(segmentation, list):
        scale = np.array([new_width / width, new_height / height])
        polygons = [(np.asarray(p).reshape(-1, 2) * scale).reshape(-1).tolist() for p in segmentation]
        merged = coco_mask.merge(coco_mask.frPyObjects(polygons, new_height, new_width))
        return decode_rle({"size": [new_height, new_width], "counts": merged["counts"].decode("ascii")})
    return np.asarray(Image.fromarray(decode_rle(segmentation)).resize(size, Image.Resampling.NEAREST))


def decode_rle(rle: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """Decode an RLE to a mask (H, W); its runs go down the columns and alternate between 0 and 1.

    pycocotools emits a NumPy 2 warning at every call.

    >>> decode_rle({"size": [2, 2], "counts": [1, 2, 1]}).tolist()
    [[0, 1], [1, 0]]
    """
    height, width = rle["size"]
    runs = rle_runs(rle["counts"]) if isinstance(rle["counts"], str) else rle["counts"]
    flat = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
    return np.ascontiguousarray(flat.reshape(width, height).T)


def make_sample(
    pixels: RGBImage, objects: Sequence[CocoObject], classes: dict[int, int], *, number: int, size: tuple[int, int],
    flip: bool, seeds: tuple[int, int] = (0, 0),
) -> Sample:  # fmt: skip
    """Scale an image and its objects, without crowds, to a size (width, height); flip it if `flip`."""
    height, width = pixels.shape[:2]
    scale = np.array([size[0] / width, size[1] / height] * 2)
    boxes, labels, masks = [], [], []
    for one in objects:
        mask = object_mask(one.segmentation, width, height, size)
        if one.crowd or not mask.any():  # the mask may be empty at this size
            continue
        x, y, w, h = one.box
        x1, y1, x2, y2 = np.array([x, y, x + w, y + h]) * scale
        boxes.append([size[0] - x2, y1, size[0] - x1, y2] if flip else [x1, y1, x2, y2])
        labels.append(classes[one.category])
        masks.append(mask[:, ::-1] if flip else mask)
    scaled = resize_image(pixels, size)
    return Sample(
        number,
        scaled.flip(-1) if flip else scaled,
        torch.tensor(np.array(boxes).reshape(-1, 4), dtype=torch.float32),
        torch.tensor(labels, dtype=torch.int64),
        torch.from_numpy(np.stack(masks) if masks else np.zeros((0, size[1], size[0]), np.uint8)),
        seeds,
    )


@dataclass
class DetectionSteps(Dataset[StepSamples]):
    """The samples of each step on one rank, as a dataset for the workers."""

    coco: CocoSet
    settings: DetectSettings
    rank: int = 0
    world_size: int = 1

    def __getitem__(self, step: int) -> StepSamples:
        epoch, batch = batch_ids(len(self.coco), self.settings.batch_size, self.settings.seed, step)
        share = self.settings.batch_size // self.world_size
        ids = batch[self.rank * share : (self.rank + 1) * share].tolist()
        bad: dict[int, str] = {}
        samples = [sample for number in ids if (sample := self._sample(epoch, number, bad)) is not None]
        return StepSamples(step, samples if len(samples) == len(ids) else [], bad)

    def _sample(self, epoch: int, wanted: int, bad: dict[int, str]) -> Sample | None:
        """Return the sample of an image, or of its first readable replacement; collect the unreadable ones in `bad`."""
        s = self.settings
        for number in with_replacements(wanted, len(self.coco), s.seed, epoch, tries=_REPLACEMENT_TRIES):
            if number in bad:
                continue
            try:
                pixels = load_image(self.coco, number)
            except BadImage as error:
                bad[number] = str(error)
                continue
            short_side, flip = draw_geometry(s, epoch, number)
            height, width = pixels.shape[:2]
            seeds = uniforms(s.seed, epoch, np.array([wanted]), SAMPLING, 2)[0]
            return make_sample(
                pixels, self.coco.objects[number], self.coco.classes(), number=number, flip=flip,
                size=scaled_size(width, height, short_side, s.long_side),
                seeds=(int(seeds[0] * _SEEDS), int(seeds[1] * _SEEDS)),
            )  # fmt: skip
        return None


def draw_geometry(settings: DetectSettings, epoch: int, number: int) -> tuple[int, bool]:
    """Return the short side of an image in an epoch, and whether it is flipped."""
    sides = settings.short_sides
    drawn = uniforms(settings.seed, epoch, np.array([number]), GEOMETRY, 2)[0]
    return sides[int(drawn[0] * len(sides))], bool(drawn[1] < 0.5)
