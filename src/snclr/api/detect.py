"""Object detection and instance segmentation: `snclr.detect`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from snclr.evaluation.detection.results import DetectResult


def detect(
    run: str | Path,
    *,
    data: str | Path,
    init: str = "run",
    encoder: str | None = None,
    recipe: Literal["1x", "2x", "cpu"] = "1x",
    iterations: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    short_side: str | tuple[int, int] | None = None,
    long_side: int | None = None,
    width: int | None = None,
    rois: int | None = None,
    proposals: int | None = None,
    anchor: int | None = None,
    keep_empty: bool | None = None,
    seed: int | None = None,
    train_annotations: str | Path | None = None,
    val_annotations: str | Path | None = None,
    images: str | Path | None = None,
    val_images: str | Path | None = None,
    max_bad_share: float = 0.1,
    detector: str | Path | None = None,
    draw: int = 6,
    draw_score: float = 0.5,
    workers: int = 0,
    accelerator: str = "auto",
    devices: str = "1",
    nodes: int = 1,
    precision: Literal["32", "bf16", "16"] = "32",
    quiet: bool = False,
) -> DetectResult:
    """Fine-tune Mask R-CNN with the run's encoder as backbone and evaluate it on a COCO dataset.

    The result is also appended to RUN/results.jsonl. Settings left at None are those of the recipe. A stop (Ctrl-C,
    SIGTERM) saves and raises StopRequested; the same call continues.

    Args:
        run: Run directory, the --out of snclr pretrain; results are written there.
        data: Folder with COCO annotation files and images.
        init: Initial weights of the backbone: run, random, or a weights file.
        encoder: ResNet to use instead of the run's encoder; requires --init random or a weights file.
        recipe: Schedule and detector: the standard 1x or 2x, or cpu, a small detector that trains in minutes.
        iterations: Training steps; 90,000 in 1x.
        batch_size: Images per step, over all ranks; 16 in 1x.
        lr: Learning rate for 16 images, × batch/16; 0.02 in 1x.
        weight_decay: Weight decay of all weights; 1e-4 in 1x.
        short_side: Pixels of the short side, or a range to draw from in training, such as 640-800.
        long_side: Maximum pixels of the long side; 1333 in 1x.
        width: Channels of the feature pyramid and the heads; 256 in 1x.
        rois: Regions per image that train the box head; 512 in 1x.
        proposals: Proposals per image in training; 2000 in 1x.
        anchor: Side of the smallest anchors in pixels; 32 in 1x.
        keep_empty: Also train on images without objects.
        seed: Seed of new weights, order, sizes and flips (default: 0).
        train_annotations: Annotation file of the training images, if it does not have a standard name.
        val_annotations: Annotation file of the validation images, if it does not have a standard name.
        images: Folder of the images, if it does not have a standard name.
        val_images: Folder of the validation images (default: images).
        max_bad_share: Stop if more than this fraction of the annotations is invalid.
        detector: Evaluate this finished RUN/detect-… folder without training.
        draw: Number of images in the figure of predictions.
        draw_score: Minimum score of the drawn predictions.
        workers: Dataloader worker processes per rank.
        accelerator: auto, cpu or cuda.
        devices: Ranks on this node: a number, or auto for all GPUs.
        nodes: Number of nodes.
        precision: 32, or bf16 or 16 on GPUs.
        quiet: Print no progress.
    """
    from snclr.distributed.collectives import name_missing_ranks
    from snclr.distributed.launch import launch
    from snclr.evaluation.detection.evaluate import evaluate_detection
    from snclr.evaluation.detection.schedule import parse_short_side, resolve
    from snclr.evaluation.session import report_errors_on_rank_zero
    from snclr.reports.figures.detection import draw_predictions

    settings = resolve(
        recipe, iterations=iterations, batch_size=batch_size, lr=lr, weight_decay=weight_decay,
        short_side=parse_short_side(short_side) if isinstance(short_side, str) else short_side, long_side=long_side,
        width=width, rois=rois, proposals=proposals, anchor=anchor, keep_empty=keep_empty, seed=seed,
    )  # fmt: skip
    fabric = launch(accelerator=accelerator, devices=devices, nodes=nodes, precision=precision)
    draw_figure = functools.partial(draw_predictions, count=draw, score=draw_score) if draw > 0 else None
    with name_missing_ranks(), report_errors_on_rank_zero():
        return evaluate_detection(
            Path(run), fabric, settings, data=data, init=init, encoder=encoder, train_annotations=train_annotations,
            val_annotations=val_annotations, images=images, val_images=val_images, max_bad_share=max_bad_share,
            detector=detector, draw=draw_figure, workers=workers,
            quiet=quiet or not fabric.is_global_zero,
        )  # fmt: skip
