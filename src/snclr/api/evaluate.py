"""Accuracy of a run's encoder: `snclr.knn`, `snclr.fewshot`, `snclr.linear`, `snclr.finetune` and `snclr.detect`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snclr.api.early_checks import check_numbers, labeled_session
from snclr.api.options import EncodingOptions, RankOptions, with_options
from snclr.evaluation.results import DetectResult, FewShotResult, FinetuneResult, KnnResult, LinearResult
from snclr.runtime.progress import set_torch_status
from snclr.runtime.settings import Range

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_options(EncodingOptions)
def knn(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    k: int | Literal["auto"] = "auto",
    temperature: float = 0.07,
    seed: int = 0,
    baselines: bool | None = None,
    **options: Unpack[EncodingOptions],
) -> KnnResult:
    """Evaluate a run with a weighted k-nearest-neighbor classifier on its frozen features.

    The result is also appended to RUN/results.jsonl. Features are cached in RUN/evaluation/features. A stop (Ctrl-C,
    SIGTERM) saves and raises StopRequested; the same call continues.

    Args:
        run: Run directory, the --out of snclr pretrain.
        data: Labeled images: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        k: Number of neighbors that vote; auto: the size of the smallest class, at least 10 and at most 200.
        temperature: Temperature of the vote weights, exp(cosine / temperature).
        seed: Seed of the train/test split.
        baselines: Also measure the untrained encoder and raw pixels (default: for at most 100,000 local images).
        options: Those of `EncodingOptions`.
    """
    check_numbers(Range(ge=1), k=None if k == "auto" else k)
    check_numbers(Range(gt=0), temperature=temperature)
    with labeled_session(run, data, test, **options) as session:
        from snclr.evaluation.knn import evaluate_knn

        return evaluate_knn(session, data=data, test=test, k=k, temperature=temperature, seed=seed, baselines=baselines)


@with_options(EncodingOptions)
def fewshot(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    labels_per_class: int = 1,
    draws: int = 20,
    seed: int = 0,
    baselines: bool | None = None,
    **options: Unpack[EncodingOptions],
) -> FewShotResult:
    """Evaluate a run by the nearest labeled image, with a few labels per class.

    The labeled images are drawn several times from the training images; the accuracy is the mean over draws. The result
    is also appended to RUN/results.jsonl. Features are cached in RUN/evaluation/features.

    Args:
        run: Run directory, the --out of snclr pretrain.
        data: Labeled images: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        labels_per_class: Labeled images of each class; all of a class that has fewer.
        draws: Number of random draws of the labeled images.
        seed: Seed of the train/test split and of the draws.
        baselines: Also measure the untrained encoder and raw pixels (default: for at most 100,000 local images).
        options: Those of `EncodingOptions`.
    """
    check_numbers(Range(ge=1), labels_per_class=labels_per_class, draws=draws)
    with labeled_session(run, data, test, **options) as session:
        from snclr.evaluation.knn import evaluate_few_shot

        return evaluate_few_shot(
            session, data=data, test=test, labels_per_class=labels_per_class, draws=draws, seed=seed,
            baselines=baselines,
        )  # fmt: skip


@with_options(EncodingOptions)
def linear(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    protocol: Literal["cached", "paper", "mae"] = "cached",
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    baselines: bool | None = None,
    **options: Unpack[EncodingOptions],
) -> LinearResult:
    """Evaluate a run with a linear classifier on its frozen encoder.

    The result is also appended to RUN/results.jsonl. A stop (Ctrl-C, SIGTERM) saves and raises StopRequested; the same
    call continues.

    Args:
        run: Run directory, the --out of snclr pretrain.
        data: Labeled images: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        protocol: cached: features of center crops, extracted once. paper: random crops and flips through the frozen
            encoder in every epoch. mae: the same with MAE's classifier, a batch norm without parameters and LARS.
        epochs: Passes over the data (default: 100 with cached, 90 with paper and mae).
        batch_size: Images per step (default: 1024 with cached, 4096 with paper, 16384 with mae).
        lr: Learning rate (default: the best of a grid with cached; 0.1, or 3 for ViTs, × batch/256 with paper; 0.1 ×
            batch/256 with mae).
        seed: Seed of the train/test split and of training.
        baselines: Also measure the untrained encoder and raw pixels (default: for at most 100,000 local images).
        options: Those of `EncodingOptions`.
    """
    check_numbers(Range(ge=1), epochs=epochs, batch_size=batch_size)
    check_numbers(Range(gt=0), lr=lr)
    with labeled_session(run, data, test, **options) as session:
        from snclr.evaluation.linear import evaluate_linear

        return evaluate_linear(
            session, data=data, test=test, protocol=protocol, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed,
            baselines=baselines,
        )  # fmt: skip


@with_options(RankOptions)
def finetune(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    labels: str | Path = "10%",
    from_scratch: bool = False,
    epochs: int | None = None,
    batch_size: int = 256,
    lr: float = 0.05,
    head_lr: float | None = None,
    weight_decay: float = 0.0,
    seed: int = 0,
    baselines: bool | None = None,
    **options: Unpack[RankOptions],
) -> FinetuneResult:
    """Fine-tune the whole encoder on a subset of the labels and measure its test accuracy.

    The result is also appended to RUN/results.jsonl. A stop (Ctrl-C, SIGTERM) saves and raises StopRequested; the same
    call continues.

    Args:
        run: Run directory, the --out of snclr pretrain.
        data: Labeled images: a folder, a list, shards or a dataset name (default: the run's training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        labels: Share of the training labels, such as 1% or 10%, or a file with one image name per line.
        from_scratch: Start from random weights instead of the run's.
        epochs: Passes over the labeled images (default: 60 up to 1% of the labels, else 30).
        batch_size: Images per step, at most the number of labeled images.
        lr: Base learning rate; the peak is lr × batch size / 256.
        head_lr: Base learning rate of the head (default: --lr).
        weight_decay: Weight decay of all weights.
        seed: Seed of the split, the subset and training.
        baselines: Also measure a linear classifier of the same labels, on the untrained encoder and on raw pixels
            (default: for at most 100,000 local images).
        options: Those of `RankOptions`.
    """
    check_numbers(Range(ge=1), epochs=epochs, batch_size=batch_size)
    check_numbers(Range(ge=0), weight_decay=weight_decay)
    check_numbers(Range(gt=0), lr=lr, head_lr=head_lr)
    from snclr.evaluation.subsets import read_share

    read_share(labels)
    with labeled_session(run, data, test, **options) as session:
        from snclr.evaluation.finetune import evaluate_finetune

        return evaluate_finetune(
            session, data=data, test=test, labels=labels, from_scratch=from_scratch, epochs=epochs,
            batch_size=batch_size, lr=lr, head_lr=head_lr, weight_decay=weight_decay, seed=seed,
            baselines=baselines,
        )  # fmt: skip


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
        val_images: Folder of the validation images (default: --images).
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
    set_torch_status()
    from snclr.distributed.collectives import name_missing_ranks
    from snclr.distributed.launch import launch
    from snclr.evaluation.detection.evaluate import evaluate_detection
    from snclr.evaluation.detection.settings import resolve
    from snclr.evaluation.session import report_errors_on_rank_zero
    from snclr.reports.figures.detection import draw_predictions

    resolved = resolve(recipe, **settings)
    fabric = launch(device=device, devices=devices, nodes=nodes, precision=precision)
    draw_figure = functools.partial(draw_predictions, count=draw, score=draw_score) if draw > 0 else None
    with name_missing_ranks(), report_errors_on_rank_zero():
        return evaluate_detection(
            Path(run), fabric, resolved, data=data, init=init, encoder=encoder, train_annotations=train_annotations,
            val_annotations=val_annotations, images=images, val_images=val_images, max_bad_share=max_bad_share,
            detector=detector, draw=draw_figure, workers=workers, quiet=quiet or not fabric.is_global_zero,
        )  # fmt: skip
