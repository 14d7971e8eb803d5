"""Run a detector on a set of images and compute average precision with pycocotools.

AP is the mean over ten IoU thresholds (0.50 to 0.95) and all classes; AP50 and AP75 are those of one threshold. All
numbers are shares in [0, 1]; None without objects.
"""

import contextlib
import io
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image

from snclr.data.decode import BadImage
from snclr.data.workers import read_items
from snclr.distributed.collectives import all_gather_objects, rank_share
from snclr.evaluation.detection.batches import load_image, resize_image, scaled_size
from snclr.evaluation.detection.coco import CocoSet
from snclr.evaluation.detection.settings import DetectSettings
from snclr.runtime.device import to_device
from snclr.runtime.progress import Progress

MASK_THRESHOLD = 0.5
_METRICS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@dataclass(frozen=True)
class Detection:
    """A detected object in pixels of its image: box (x, y, width, height), mask as compressed RLE, class from 1."""

    image: int
    label: int
    score: float
    box: tuple[float, float, float, float]
    rle: dict[str, Any]


@dataclass(frozen=True)
class DetectionAP:
    """AP, AP50, AP75 and the AP of small, medium and large objects, by name, for boxes and masks."""

    box: dict[str, float | None]
    mask: dict[str, float | None]
    classes: list[dict[str, Any]]
    """Name, number of objects without crowds, box AP and mask AP of each class."""

    def numbers(self) -> dict[str, float | None]:
        """Return the six columns of the paper's table by name."""
        columns = (("bb", self.box), ("mk", self.mask))
        return {f"{name}_{kind}": values[name] for kind, values in columns for name in _METRICS[:3]}


@dataclass
class _TestImages(Dataset[tuple[int, Tensor | None, str]]):
    """Number and pixels of each image at its test size; None and the reason instead of pixels if it is unreadable."""

    coco: CocoSet
    settings: DetectSettings

    def __getitem__(self, number: int) -> tuple[int, Tensor | None, str]:
        try:
            pixels = load_image(self.coco, number)
        except BadImage as error:
            return number, None, str(error)
        size = scaled_size(pixels.shape[1], pixels.shape[0], self.settings.short_side[1], self.settings.long_side)
        return number, resize_image(pixels, size), ""


def detect_objects(
    model: MaskRCNN, coco: CocoSet, settings: DetectSettings, *, device: torch.device | str, workers: int = 0,
    quiet: bool = False,
) -> tuple[list[Detection], dict[int, str]]:  # fmt: skip
    """Return the detections in all images, and the unreadable images; the ranks share the work.

    The batch size is 1, so that no result depends on the other images of a batch.
    """
    model.eval()
    share = rank_share(len(coco))
    detections: list[Detection] = []
    bad: dict[int, str] = {}
    with Progress("detecting", len(share), quiet=quiet) as progress:
        tested = read_items(_TestImages(coco, settings), share.start, share.stop, workers=workers)
        for number, image, reason in tested:
            if image is None:
                bad[number] = reason
            else:
                detections += _detect(model, coco, number, image, device)
            progress.update(1)
    gathered, unreadable = all_gather_objects(detections), all_gather_objects(bad)
    return [one for part in gathered for one in part], {key: why for part in unreadable for key, why in part.items()}


@torch.no_grad()
def _detect(model: MaskRCNN, coco: CocoSet, number: int, pixels: Tensor, device: torch.device | str) -> list[Detection]:
    from pycocotools import mask as coco_mask

    model.transform.pad_to = (0, 0)
    (result,) = model([to_device(pixels, device).float() / 255])
    image = coco.images[number]
    scale = torch.tensor([image.width / pixels.shape[2], image.height / pixels.shape[1]] * 2)
    boxes, masks = result["boxes"].float().cpu() * scale, result["masks"].float().cpu()
    labels, scores = result["labels"].tolist(), result["scores"].tolist()
    detections = []
    for row, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        # One at a time: a hundred masks of a large photograph at once take gigabytes.
        pasted = paste_masks_in_image(masks[row : row + 1], boxes[row : row + 1], (image.height, image.width))[0, 0]
        rle = coco_mask.encode(np.asfortranarray((pasted > MASK_THRESHOLD).numpy().astype(np.uint8)))
        rle = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
        detections.append(Detection(number, labels[row], scores[row], (x1, y1, x2 - x1, y2 - y1), rle))
    return detections


def average_precision(coco: CocoSet, detections: Sequence[Detection], leave_out: Collection[int] = ()) -> DetectionAP:
    """Return the AP of detections against the set's objects, without the images in `leave_out`."""
    truth = _truth(coco, leave_out)
    kept = [one for one in detections if one.image not in leave_out]
    box, box_classes = _evaluate(truth, kept, "bbox")
    mask, mask_classes = _evaluate(truth, kept, "segm")
    counts = Counter(entry["category_id"] for entry in truth["annotations"] if not entry["iscrowd"])
    columns = zip(coco.categories.values(), box_classes, mask_classes, strict=True)
    return DetectionAP(
        box,
        mask,
        [
            {"name": name, "objects": counts[number], "box": box_ap, "mask": mask_ap}
            for number, (name, box_ap, mask_ap) in enumerate(columns, start=1)
        ],
    )


def _truth(coco: CocoSet, leave_out: Collection[int]) -> dict[str, Any]:
    """Return the set in COCO's format. Ids count from 1: COCOeval takes a match with object 0 for no match."""
    classes = coco.classes()
    images = [
        {"id": number + 1, "width": image.width, "height": image.height}
        for number, image in enumerate(coco.images)
        if number not in leave_out
    ]
    objects = [(image["id"], one) for image in images for one in coco.objects[image["id"] - 1]]
    annotations = [
        {
            "id": number, "image_id": image, "category_id": classes[one.category], "bbox": list(one.box),
            "segmentation": one.segmentation, "area": one.area, "iscrowd": int(one.crowd),
        }
        for number, (image, one) in enumerate(objects, start=1)
    ]  # fmt: skip
    return {"images": images, "annotations": annotations, "categories": [{"id": number} for number in classes.values()]}


def _evaluate(
    truth: dict[str, Any], detections: Sequence[Detection], kind: str
) -> tuple[dict[str, float | None], list[float | None]]:
    """Return the first six numbers of COCOeval's summary by name, and the AP of each class."""
    from pycocotools.cocoeval import COCOeval

    results = [
        {"image_id": one.image + 1, "category_id": one.label, "score": one.score}
        | ({"bbox": list(one.box)} if kind == "bbox" else {"segmentation": one.rle})
        for one in detections
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a report
        objects = _index(truth)
        found = objects.loadRes(results) if results else _index({**truth, "annotations": []})
        evaluation = COCOeval(objects, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # threshold, recall, class; all areas, most detections
    known = [values[values > -1] for values in precision.transpose(2, 0, 1)]
    classes = [float(values.mean()) if values.size else None for values in known]
    values = [float(value) if value >= 0 else None for value in evaluation.stats[:6]]
    return dict(zip(_METRICS, values, strict=True)), classes


def _index(dataset: dict[str, Any]) -> Any:
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = dataset
    coco.createIndex()
    return coco
