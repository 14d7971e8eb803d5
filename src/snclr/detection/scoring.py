"""Detections of a set of images, and their average precision by pycocotools, the field's own measure.

AP is the mean over ten IoU thresholds (0.50 to 0.95) and all classes; AP50 and AP75 are those of one threshold. All
numbers are shares in [0, 1]; None where there is no object to find.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image

from snclr.data.decode import BadImage
from snclr.data.workers import in_processes
from snclr.detection.batches import compressed, load_picture, resize_picture, scaled_size
from snclr.detection.coco_folder import CocoSet
from snclr.detection.schedule import DetectSettings
from snclr.distributed import gather_objects, share_of
from snclr.progress import Progress

MASK_THRESHOLD = 0.5


@dataclass(frozen=True)
class Detection:
    """One found object in an image's own pixels: box (x, y, width, height), mask as compressed RLE, class from 1."""

    image: int
    label: int
    score: float
    box: tuple[float, float, float, float]
    rle: dict[str, Any]


@dataclass(frozen=True)
class ClassScore:
    """AP of one class, and how many objects of it (crowds not counted) the set has."""

    name: str
    objects: int
    box: float | None
    mask: float | None


@dataclass(frozen=True)
class Score:
    """The columns of the table, (AP, AP50, AP75, and AP of small, medium and large objects), for boxes and masks."""

    box: tuple[float | None, ...]
    mask: tuple[float | None, ...]
    classes: list[ClassScore]

    def numbers(self) -> dict[str, float | None]:
        """The six columns of the paper's table by name."""
        names = ("AP", "AP50", "AP75")
        named = {f"{name}_bb": value for name, value in zip(names, self.box, strict=False)}
        return named | {f"{name}_mk": value for name, value in zip(names, self.mask, strict=False)}


class _Loaded(NamedTuple):
    number: int
    picture: Tensor | None
    reason: str


@dataclass
class _Pictures(Dataset[_Loaded]):
    """Test pictures by number, at their test size; sent to the workers."""

    coco: CocoSet
    short_side: int
    long_side: int

    def __getitem__(self, number: int) -> _Loaded:
        try:
            picture = load_picture(self.coco, number)
        except BadImage as error:
            return _Loaded(number, None, error.reason)
        size = scaled_size(picture.shape[1], picture.shape[0], self.short_side, self.long_side)
        return _Loaded(number, resize_picture(picture, size), "")


def find_objects(
    model: MaskRCNN, coco: CocoSet, settings: DetectSettings, *, device: torch.device | str, workers: int = 0,
    quiet: bool = False,
) -> tuple[list[Detection], dict[int, str]]:  # fmt: skip
    """Detections in all images, and the images that could not be read; several processes share the work.

    Images go through one at a time, so that no result depends on its neighbours in a batch.
    """
    model.eval()
    pictures = _Pictures(coco, settings.short_side[1], settings.long_side)
    share = share_of(len(coco))
    found: list[Detection] = []
    bad: dict[int, str] = {}
    with Progress("detecting", len(share), quiet=quiet) as progress:
        for number, picture, reason in _read(pictures, share, workers):
            if picture is None:
                bad[number] = reason
            else:
                found += _in_picture(model, coco, number, picture, device)
            progress.update(1)
    every, unreadable = gather_objects(found), gather_objects(bad)
    return [one for part in every for one in part], {key: why for part in unreadable for key, why in part.items()}


def _read(pictures: _Pictures, share: range, workers: int) -> Iterator[_Loaded]:
    if workers == 0:
        return map(pictures.__getitem__, share)
    return in_processes(pictures, share.start, share.stop, workers=workers)


@torch.no_grad()
def _in_picture(
    model: MaskRCNN, coco: CocoSet, number: int, picture: Tensor, device: torch.device | str
) -> list[Detection]:
    from pycocotools import mask as coco_mask

    model.transform.pad_to = (0, 0)
    (result,) = model([picture.to(device).float() / 255])
    image = coco.images[number]
    scale = torch.tensor([image.width / picture.shape[2], image.height / picture.shape[1]] * 2)
    boxes, masks = result["boxes"].float().cpu() * scale, result["masks"].float().cpu()
    found = []
    for row in range(len(boxes)):
        # One at a time: a hundred masks of a large photograph at once take gigabytes.
        pasted = paste_masks_in_image(masks[row : row + 1], boxes[row : row + 1], (image.height, image.width))[0, 0]
        rle = coco_mask.encode(np.asfortranarray((pasted > MASK_THRESHOLD).numpy().astype(np.uint8)))
        x1, y1, x2, y2 = boxes[row].tolist()
        found.append(
            Detection(
                number, int(result["labels"][row]), float(result["scores"][row]), (x1, y1, x2 - x1, y2 - y1),
                {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")},
            )
        )  # fmt: skip
    return found


def average_precision(coco: CocoSet, detections: Sequence[Detection], leave_out: Collection[int] = ()) -> Score:
    """AP of the detections against the set's objects; the images in `leave_out` (numbers) do not count."""
    from pycocotools.coco import COCO

    truth = COCO()
    truth.dataset = _truth(coco, leave_out)
    kept = [found for found in detections if found.image not in leave_out]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a report of its own
        truth.createIndex()
        box, box_classes = _evaluate(truth, kept, "bbox")
        mask, mask_classes = _evaluate(truth, kept, "segm")
    counts = [0] * (len(coco.categories) + 1)
    for entry in truth.dataset["annotations"]:
        counts[entry["category_id"]] += not entry["iscrowd"]
    names = list(coco.categories.values())
    return Score(
        box, mask,
        [ClassScore(name, counts[i + 1], box_classes[i], mask_classes[i]) for i, name in enumerate(names)],
    )  # fmt: skip


def _truth(coco: CocoSet, leave_out: Collection[int]) -> dict[str, Any]:
    """The set as pycocotools takes it; ids count from 1 there, since it holds a match with object 0 for none."""
    classes = coco.classes()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(coco.images):
        if number in leave_out:
            continue
        images.append({"id": number + 1, "width": image.width, "height": image.height})
        for found in coco.objects[number]:
            mask = found.segmentation if isinstance(found.segmentation, list) else compressed(found.segmentation)
            annotations.append(
                {
                    "id": len(annotations) + 1, "image_id": number + 1, "category_id": classes[found.category],
                    "bbox": list(found.box), "segmentation": mask, "area": found.area, "iscrowd": int(found.crowd),
                }
            )  # fmt: skip
    categories = [{"id": number, "name": coco.categories[key]} for key, number in classes.items()]
    return {"images": images, "annotations": annotations, "categories": categories, "info": {}}


def _evaluate(
    truth: Any, detections: Sequence[Detection], kind: str
) -> tuple[tuple[float | None, ...], list[float | None]]:
    """The first six numbers of pycocotools' summary, and AP of each class."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    results = [_as_result(found, kind) for found in detections]
    if results:
        found = truth.loadRes(results)
    else:  # loadRes looks at the first
        found = COCO()
        found.dataset = {**truth.dataset, "annotations": []}
        found.createIndex()
    judged = COCOeval(truth, found, kind)
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    precision = judged.eval["precision"][:, :, :, 0, -1]  # threshold, recall, class; all areas, most detections
    classes = [_mean(precision[:, :, number]) for number in range(precision.shape[2])]
    return tuple(float(value) if value >= 0 else None for value in judged.stats[:6]), classes


def _as_result(found: Detection, kind: str) -> dict[str, Any]:
    """A detection as pycocotools takes it: with a box or with a mask, since both would make it judge masks by boxes."""
    common = {"image_id": found.image + 1, "category_id": found.label, "score": found.score}
    if kind == "bbox":
        return {**common, "bbox": list(found.box)}
    return {**common, "segmentation": {"size": found.rle["size"], "counts": found.rle["counts"].encode("ascii")}}


def _mean(values: Any) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None
