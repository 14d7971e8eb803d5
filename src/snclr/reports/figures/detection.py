"""Detections: each image twice, with its annotated and with its predicted objects."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision.utils import draw_segmentation_masks

from snclr.data.decode import RGBImage
from snclr.evaluation.detection.batches import load_image, object_mask
from snclr.evaluation.detection.coco import CocoSet
from snclr.evaluation.detection.scoring import Detection
from snclr.reports.figures.drawing import FAINT, INK, PALETTE, new_figure, save_png
from snclr.reports.text import visible

_COLUMNS = 4
_MASK_OPACITY = 0.45


@dataclass(frozen=True)
class DrawnObject:
    """An object with its box (x, y, width, height) and mask (H, W) in pixels of the image; no score if annotated."""

    name: str
    score: float | None
    box: tuple[float, float, float, float]
    mask: npt.NDArray[np.uint8]


Panel = tuple[str, RGBImage, Sequence[DrawnObject]]
"""Heading, image and objects of one plot."""


def draw_predictions(
    coco: CocoSet, detections: Sequence[Detection], path: Path, *, count: int, score: float, title: str,
    leave_out: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Draw `count` images, evenly spaced over the dataset, with their detections; return their indices."""
    usable = [index for index in range(len(coco)) if index not in leave_out]
    chosen = usable if len(usable) <= count else [usable[i * len(usable) // count] for i in range(count)]
    draw_panels([panel for index in chosen for panel in _panels_of(coco, detections, index, score)], path, title=title)
    return chosen


def draw_panels(panels: Sequence[Panel], path: Path | str, *, title: str) -> None:
    """Write the figure to `path` (PNG), with up to four panels per row."""
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(image) / image.shape[1] for _, image, _ in panels)
    figure = new_figure(4.3 * columns, 0.5 + rows * (4.2 * tallest + 0.6), dpi=100, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (heading, image, objects) in zip(axes, panels, strict=False):
        axis.set_title(heading, loc="left", fontsize=10, color=FAINT, parse_math=False)
        _draw_objects(axis, image, objects)
    save_png(figure, path)


def blend(image: RGBImage, objects: Sequence[DrawnObject]) -> RGBImage:
    """Overlay the masks in the objects' colors, the first object on top."""
    if not objects:
        return image
    colors = [PALETTE[number % len(PALETTE)] for number in range(len(objects))]
    masks = torch.from_numpy(np.stack([one.mask for one in objects])).bool()
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    drawn = draw_segmentation_masks(pixels, masks.flip(0), alpha=_MASK_OPACITY, colors=colors[::-1])
    return drawn.permute(1, 2, 0).numpy()


def _draw_objects(axis: Any, image: RGBImage, objects: Sequence[DrawnObject]) -> None:
    """Draw an image with masks, boxes, names and scores."""
    from matplotlib.patches import Rectangle

    axis.imshow(blend(image, objects), interpolation="antialiased")
    for number, one in enumerate(objects):
        left, top, width, height = one.box
        color = PALETTE[number % len(PALETTE)]
        axis.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, fill=False, edgecolor=color, linewidth=1.6))
        axis.text(
            left, max(top, 0), one.name if one.score is None else f"{one.name} {one.score:.2f}", color="black",
            fontsize=7, va="bottom", parse_math=False, clip_on=True,
            bbox={"facecolor": color, "alpha": 0.85, "pad": 1.0, "edgecolor": "none"},
        )  # fmt: skip


def _panels_of(coco: CocoSet, detections: Sequence[Detection], index: int, score: float) -> tuple[Panel, Panel]:
    """Load an image with its annotations, and with its detections of at least `score`, by decreasing score."""
    image = coco.images[index]
    size = (image.width, image.height)
    names = list(coco.categories.values())
    annotated = [
        DrawnObject(coco.categories[o.category], None, o.box, object_mask(o.segmentation, *size, size))
        for o in coco.objects[index]
    ]
    predicted = [
        DrawnObject(names[d.label - 1], d.score, d.box, np.asarray(object_mask(d.rle, *size, size)))
        for d in sorted(detections, key=lambda d: -d.score)
        if d.image == index and d.score >= score
    ]
    pixels = load_image(coco, index)
    heading = f"{visible(image.name, 40)}: annotated ({len(annotated)})"
    return (heading, pixels, annotated), (f"predicted ({len(predicted)} with score ≥ {score:g})", pixels, predicted)
