"""Object detection and instance segmentation: `snclr.detect`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from snclr.runtime.results import Result


@dataclass(frozen=True)
class DetectResult(Result):
    """Average precision of a detector as recorded in results.jsonl: values in [0, 1], None if there are no objects."""

    kind: str
    time: str
    """When the result was recorded (ISO 8601, UTC)."""
    numbers: dict[str, float | None]
    """AP, AP50 and AP75 of boxes (_bb) and masks (_mk)."""
    protocol: str
    start: str
    """Where the initial weights come from."""
    settings: dict[str, Any]
    detector: str
    """Folder of the trained detector."""
    boxes: dict[str, float | None]
    masks: dict[str, float | None]
    classes: Sequence[dict[str, Any]]
    detections: int
    faults: int
    """Problems in annotations and images."""
    faults_file: str | None
    figure: str | None
    model_sha256: str


def detect(
    run: str | Path,
    *,
    data: str | Path,
    init: str = "run",
    encoder: str | None = None,
    recipe: Literal["1x", "2x", "cpu"] = "1x",
    train_annotations: str | Path | None = None,
    val_annotations: str | Path | None = None,
    images: str | Path | None = None,
    val_images: str | Path | None = None,
    max_bad_share: float = 0.1,
    detector: str | Path | None = None,
    draw: int = 6,
    draw_score: float = 0.5,
    workers: int = 0,
    device: str = "auto",
    devices: str = "1",
    nodes: int = 1,
    precision: Literal["32", "bf16", "16", "bf16-mixed", "16-mixed"] = "32",
    quiet: bool = False,
    **settings: Any,
) -> DetectResult:
    """Fine-tune Mask R-CNN with the run's encoder as backbone and evaluate it on a COCO dataset.

    The result is also appended to RUN/results.jsonl. A stop (Ctrl-C, SIGTERM) saves and raises StopRequested; the same
    call continues.

    Args:
        run: Run directory, the --out of snclr pretrain; results are written there.
        data: Folder with COCO annotation files and images.
        init: Initial weights of the backbone: run, random, or a weights file.
        encoder: A ResNet to use instead of the run's encoder; requires --init random or a weights file.
        recipe: Schedule and detector: the standard 1x or 2x, or cpu, a small detector that trains in minutes.
        train_annotations: Annotation file of the training images, if it does not have a standard name.
        val_annotations: Annotation file of the validation images, if it does not have a standard name.
        images: Folder of the images, if it does not have a standard name.
        val_images: Folder of the validation images (default: images).
        max_bad_share: Stop if more than this fraction of the annotations is invalid.
        detector: Evaluate this finished RUN/detect-… folder without training.
        draw: Number of images in the figure of predictions.
        draw_score: Minimum score of the drawn predictions.
        workers: Dataloader worker processes per rank.
        device: Device: cpu, cuda, cuda:1 for the second GPU, or auto: a GPU if there is one.
        devices: Ranks per node, each on its own device: a number, or auto for all GPUs.
        nodes: Number of nodes.
        precision: 32, or bf16 or 16 (also called bf16-mixed and 16-mixed) on GPUs.
        quiet: Print no progress.
        settings: Values for the fields of `snclr.evaluation.detection.settings.DetectSettings`, such as `iterations` or
            `lr`; the recipe supplies the rest.
    """
    from snclr.distributed.collectives import name_missing_ranks
    from snclr.distributed.launch import launch
    from snclr.evaluation.detection.evaluate import evaluate_detection
    from snclr.evaluation.detection.settings import resolve
    from snclr.evaluation.session import report_errors_on_rank_zero
    from snclr.reports.figures.detection import draw_predictions

    resolved = resolve(recipe, **settings)
    fabric = launch(accelerator=device, devices=devices, nodes=nodes, precision=precision)
    draw_figure = functools.partial(draw_predictions, count=draw, score=draw_score) if draw > 0 else None
    with name_missing_ranks(), report_errors_on_rank_zero():
        record = evaluate_detection(
            Path(run), fabric, resolved, data=data, init=init, encoder=encoder, train_annotations=train_annotations,
            val_annotations=val_annotations, images=images, val_images=val_images, max_bad_share=max_bad_share,
            detector=detector, draw=draw_figure, workers=workers, quiet=quiet or not fabric.is_global_zero,
        )  # fmt: skip
    return DetectResult(**record)
