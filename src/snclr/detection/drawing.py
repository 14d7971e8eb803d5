"""Which images are drawn, and their objects, for the figure of predictions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from snclr.detection.batches import load_picture, object_mask
from snclr.detection.coco_folder import CocoSet
from snclr.detection.scoring import Detection
from snclr.report.detection_figure import Drawn, DrawnImage, draw_detections


def draw_predictions(
    coco: CocoSet, detections: Sequence[Detection], path: Path, *, count: int, score: float, title: str,
    leave_out: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Draw some images, evenly spread over the set, with what was found in them; returns their numbers."""
    able = [number for number in range(len(coco)) if number not in leave_out]
    chosen = [able[i * len(able) // count] for i in range(min(count, len(able)))] if len(able) > count else able
    draw_detections([_drawn(coco, detections, number, score) for number in chosen], path, title=title, score=score)
    return chosen


def _drawn(coco: CocoSet, detections: Sequence[Detection], number: int, score: float) -> DrawnImage:
    image = coco.images[number]
    size = (image.width, image.height)
    names = list(coco.categories.values())
    truth = [
        Drawn(coco.categories[o.category], None, o.box, object_mask(o.segmentation, *size, size))
        for o in coco.objects[number]
    ]
    found = [
        Drawn(names[d.label - 1], d.score, d.box, np.asarray(object_mask(d.rle, *size, size)))
        for d in sorted(detections, key=lambda d: -d.score)
        if d.image == number and d.score >= score
    ]
    return DrawnImage(image.name, load_picture(coco, number), truth, found)
