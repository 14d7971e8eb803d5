"""Training samples: which images a step has, at which size, mirrored or not, as pure functions of (seed, step, image).

So any number of workers or processes, and a resumed run, trains on the same pixels. A picture comes as uint8 (3, H, W)
with its objects: boxes (n, 4) as x1, y1, x2, y2, labels (n,) from 1, masks (n, H, W).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from snclr.data.decode import BadImage, Picture, decode
from snclr.data.order import REPLACEMENT, batch_ids, uniforms
from snclr.data.workers import in_processes
from snclr.detection.annotation_check import CocoObject, rle_runs
from snclr.detection.coco_folder import CocoSet
from snclr.detection.schedule import DetectSettings, short_sides

GEOMETRY, SAMPLING = 0, 1
"""What the numbers of an image are for: its size and mirroring, and the choice of anchors and regions."""
_REPLACEMENT_TRIES = 20
_SEEDS = 2**31


class Sample(NamedTuple):
    """One picture at its training size, and its objects."""

    number: int
    picture: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    seeds: tuple[int, int]
    """Of the choice of anchors, and of regions."""


class StepSamples(NamedTuple):
    """This process's samples of a step, and the images that could not be read, with the reasons."""

    step: int
    samples: list[Sample]
    bad: dict[int, str]


def scaled_size(width: int, height: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Width and height with the short side as asked, or less where the long one would exceed its limit.

    >>> scaled_size(640, 480, 800, 1333), scaled_size(1000, 250, 800, 1333)
    ((1067, 800), (1333, 333))
    """
    scale = min(short_side / min(width, height), long_side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def load_picture(coco: CocoSet, number: int) -> Picture:
    """The image, uint8 (H, W, 3); BadImage also where its size is not what the annotations say."""
    picture = decode(coco.path(number))
    image = coco.images[number]
    if picture.shape[:2] != (image.height, image.width):
        height, width = picture.shape[:2]
        raise BadImage(f"the file is {width}×{height}; the annotations say {image.width}×{image.height}")
    return picture


def resize_picture(picture: Picture, size: tuple[int, int]) -> Tensor:
    """Scale to (width, height), smoothed where it shrinks: uint8 (3, H, W)."""
    scaled = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR))
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def object_mask(segmentation: Any, width: int, height: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """The mask of an object in an image of width × height, drawn at another size (width, height): uint8 (H, W).

    Polygons are scaled as such, so that small objects keep their outline; an RLE is scaled by nearest pixels.
    """
    from pycocotools import mask as coco_mask

    new_width, new_height = size
    if isinstance(segmentation, list):
        scale = np.array([new_width / width, new_height / height])
        polygons = [(np.asarray(p).reshape(-1, 2) * scale).reshape(-1).tolist() for p in segmentation]
        merged = coco_mask.merge(coco_mask.frPyObjects(polygons, new_height, new_width))
        return decode_rle({"size": [new_height, new_width], "counts": merged["counts"].decode("ascii")})
    drawn = decode_rle(segmentation)
    if (new_width, new_height) == (width, height):
        return drawn
    return np.asarray(Image.fromarray(drawn).resize(size, Image.Resampling.NEAREST))


def decode_rle(rle: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """The mask (H, W) of an RLE whose runs fill it: they go down the columns, empty and full in turn.

    pycocotools does it too, with a warning from NumPy 2 at every call.

    >>> decode_rle({"size": [2, 2], "counts": [1, 2, 1]}).tolist()
    [[0, 1], [1, 0]]
    """
    height, width = rle["size"]
    runs = rle_runs(rle["counts"]) if isinstance(rle["counts"], str) else rle["counts"]
    flat = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
    return np.ascontiguousarray(flat.reshape(width, height).T)


def compressed(rle: dict[str, Any]) -> dict[str, Any]:
    """An RLE in pycocotools' own form, whether its counts are a list or a string."""
    from pycocotools import mask as coco_mask

    if isinstance(rle["counts"], list):
        return coco_mask.frPyObjects(rle, *rle["size"])
    return {"size": rle["size"], "counts": rle["counts"].encode("ascii")}


def make_sample(
    picture: Picture, objects: Sequence[CocoObject], classes: dict[int, int], *, number: int, size: tuple[int, int],
    flip: bool, seeds: tuple[int, int] = (0, 0),
) -> Sample:  # fmt: skip
    """Bring a picture and its objects (crowds left out) to a size (width, height), mirrored or not."""
    height, width = picture.shape[:2]
    scale = np.array([size[0] / width, size[1] / height] * 2)
    boxes, labels, masks = [], [], []
    for found in objects:
        mask = object_mask(found.segmentation, width, height, size)
        if found.crowd or not mask.any():  # a mask that vanishes at this size has nothing to teach
            continue
        x, y, w, h = found.box
        x1, y1, x2, y2 = np.array([x, y, x + w, y + h]) * scale
        boxes.append([size[0] - x2, y1, size[0] - x1, y2] if flip else [x1, y1, x2, y2])
        labels.append(classes[found.category])
        masks.append(mask[:, ::-1] if flip else mask)
    scaled = resize_picture(picture, size)
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
    """The steps of a training by number, for one of several processes; sent to the workers."""

    coco: CocoSet
    settings: DetectSettings
    rank: int = 0
    world_size: int = 1

    def step_ids(self, step: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Epoch and image numbers of this process's rows."""
        epoch, ids = batch_ids(len(self.coco), self.settings.batch_size, self.settings.seed, step)
        share = self.settings.batch_size // self.world_size
        return epoch, ids[self.rank * share : (self.rank + 1) * share]

    def __getitem__(self, step: int) -> StepSamples:
        epoch, ids = self.step_ids(step)
        bad: dict[int, str] = {}
        found = (self._sample(epoch, wanted, bad) for wanted in ids.tolist())
        samples = [sample for sample in found if sample is not None]
        return StepSamples(step, samples if len(samples) == len(ids) else [], bad)

    def _sample(self, epoch: int, wanted: int, bad: dict[int, str]) -> Sample | None:
        """An image's sample, or that of the first good one of its stand-ins; notes the bad ones."""
        s = self.settings
        stand_ins = uniforms(s.seed, epoch, np.array([wanted]), REPLACEMENT, _REPLACEMENT_TRIES)[0]
        for number in (wanted, *(int(u * len(self.coco)) for u in stand_ins)):
            if number in bad:
                continue
            try:
                picture = load_picture(self.coco, number)
            except BadImage as error:
                bad[number] = error.reason
                continue
            short_side, flip = draw_geometry(s, epoch, number)
            height, width = picture.shape[:2]
            chosen = uniforms(s.seed, epoch, np.array([wanted]), SAMPLING, 2)[0]
            return make_sample(
                picture, self.coco.objects[number], self.coco.classes(), number=number, flip=flip,
                size=scaled_size(width, height, short_side, s.long_side),
                seeds=(int(chosen[0] * _SEEDS), int(chosen[1] * _SEEDS)),
            )  # fmt: skip
        return None


def draw_geometry(settings: DetectSettings, epoch: int, number: int) -> tuple[int, bool]:
    """The short side of an image in an epoch, and whether it is mirrored."""
    sides = short_sides(settings)
    drawn = uniforms(settings.seed, epoch, np.array([number]), GEOMETRY, 2)[0]
    return sides[int(drawn[0] * len(sides))], bool(drawn[1] < 0.5)


def read_steps(steps: DetectionSteps, start: int, stop: int, workers: int) -> Iterator[StepSamples]:
    """Steps start … stop - 1; `workers` processes prepare them ahead."""
    if workers == 0:
        return map(steps.__getitem__, range(start, stop))
    return in_processes(steps, start, stop, workers=workers)
