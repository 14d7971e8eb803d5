"""Fine-tune a Mask R-CNN from a run, evaluate it, and record the result."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from snclr.distributed.collectives import check_equal_across_ranks, raise_on_all_ranks
from snclr.distributed.launch import check_batch_size
from snclr.errors import UserError, count
from snclr.evaluation.detection.coco import CocoSet, Fault, open_coco
from snclr.evaluation.detection.model import InitialWeights, build_detector, load_initial_weights
from snclr.evaluation.detection.scoring import Detection, average_precision, detect_objects
from snclr.evaluation.detection.settings import DetectSettings
from snclr.evaluation.detection.task import CHECKPOINTS, DetectionTask, Detector, open_detector, save_detector
from snclr.evaluation.results import DetectResult, append_result
from snclr.evaluation.state import EvalState, fit_task, on_rank_zero
from snclr.io.atomic import check_writable, remove_leftovers, write_atomic
from snclr.io.hashing import weights_digest
from snclr.runtime.stop import StopFlag

_SHOWN_FAULTS = 10


def evaluate_detection(
    run: Path, fabric: Any, settings: DetectSettings, *, data: str | Path, init: str, encoder: str | None,
    max_bad_share: float, detector: str | Path | None, draw: Callable[..., Any] | None, workers: int, quiet: bool,
    **files: Any,
) -> DetectResult:  # fmt: skip
    """Train the detector of these settings, or open a finished one, and evaluate it on the validation images.

    `files` are arguments of `open_coco`; `draw` writes a figure of predictions. A stop saves a checkpoint in the run
    directory and raises StopRequested; the same call continues. The result is appended to results.jsonl.
    """
    with raise_on_all_ranks():
        start = None if detector is not None else load_initial_weights(run, init, encoder, settings.seed)
        train, val, description = open_coco(data, seed=settings.seed, **files)
        for part in (train, val):
            part.check_faults(max_bad_share)
    for part in (train, val):
        check_equal_across_ranks(part.fingerprint, f"images in {data}")
    faults = list(dict.fromkeys([*train.faults, *val.faults]))
    if faults and not quiet:
        shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN_FAULTS])
        print(f"warning: faults in the annotations ({len(faults)} in all), such as{shown}", file=sys.stderr)
    if start is None:
        trained = _open_trained(run, Path(str(detector)), val, fabric)
    else:
        opening = f"on {description}, {settings.iterations:,} iterations of {count(settings.batch_size, 'image')}"
        trained = _train(run, start, train, settings, fabric, opening=opening, workers=workers, quiet=quiet)
    detections, bad = detect_objects(
        trained.model, val, trained.settings, device=fabric.device, workers=workers, quiet=quiet
    )
    faults += [*val.unreadable(bad, "left out"), *trained.unreadable]
    return on_rank_zero(lambda: _record(run, trained, val, detections, bad, faults, draw))


def _open_trained(run: Path, folder: Path, val: CocoSet, fabric: Any) -> Detector:
    """Open a trained detector for evaluation on `val`."""
    trained = open_detector(folder, fabric.device)
    with raise_on_all_ranks():
        if trained is None:
            raise UserError(f"{folder} has no finished detector; give a folder RUN/detect-… that has one")
        if trained.categories != val.categories:
            raise UserError(
                f"the detector in {folder} was trained on the classes {', '.join(trained.categories.values())}; "
                f"{val.file} has {', '.join(val.categories.values())}, or other ids"
            )
    for directory in (run, folder):
        advice = "the result is written there: copy it to a directory you own"
        on_rank_zero(functools.partial(check_writable, directory / "results", advice))
    return trained


def _train(
    run: Path, start: InitialWeights, train: CocoSet, settings: DetectSettings, fabric: Any, *, opening: str,
    workers: int, quiet: bool,
) -> Detector:  # fmt: skip
    """Return the finished detector of these settings; train it unless it exists."""
    with raise_on_all_ranks():
        check_batch_size(settings.batch_size, fabric.world_size)
        chosen = train.for_training(keep_empty=settings.keep_empty)
        if len(chosen) < settings.batch_size:
            raise UserError(
                f"too few images of {train.file} have objects: {len(chosen)}, fewer than one batch of "
                f"{settings.batch_size}. Give --batch-size {max(1, len(chosen))} or less."
            )
        identity = {
            "settings": asdict(settings),
            "start": weights_digest(start.encoder.state_dict()),
            "encoder": start.spec.to_dict(),
            "data": chosen.fingerprint(),
            "categories": list(chosen.categories.items()),
        }
        saved = EvalState(run, f"detect-{start.tag}", identity, keep=True)
        torch.manual_seed(settings.seed)
        model = build_detector(start.encoder, start.spec, len(chosen.categories), settings)
    check_equal_across_ranks(lambda: saved.identity["start"], f"weights in {run}")
    folder = saved.folder
    task = DetectionTask(model, chosen, settings, fabric, folder / "nonfinite.json", workers)
    with saved:
        on_rank_zero(lambda: remove_leftovers(folder / CHECKPOINTS))
        trained = open_detector(folder, fabric.device)
        if trained is not None:
            if not quiet:
                print(f"already trained: {folder}; evaluating it", file=sys.stderr)
            return trained
        with StopFlag() as stop:
            fit_task(
                task, saved, CHECKPOINTS, description="fine-tuning", stop=stop, device=fabric.device, quiet=quiet,
                start_message=f"fine-tuning a Mask R-CNN {start.spec.name}-FPN from {start.description} {opening}",
            )  # fmt: skip
        protocol = _training_protocol(settings, start, chosen, len(train), fabric.world_size)
        on_rank_zero(lambda: save_detector(task, saved, start=start.description, protocol=protocol))
        trained = open_detector(folder, fabric.device)
        assert trained is not None
        return trained


def _record(
    run: Path, detector: Detector, val: CocoSet, detections: Sequence[Detection], bad: dict[int, str],
    faults: list[Fault], draw: Callable[..., Any] | None,
) -> DetectResult:  # fmt: skip
    """Score the detections, draw some of them, and append the result to results.jsonl."""
    score = average_precision(val, detections, bad)
    run.mkdir(parents=True, exist_ok=True)
    faults_file, figure = detector.folder / "faults.jsonl", None
    if faults:
        write_atomic(faults_file, "".join(json.dumps(asdict(fault), ensure_ascii=False) + "\n" for fault in faults))
    if draw is not None and len(bad) < len(val):
        figure = detector.folder / "predictions.png"
        title = f"{detector.settings.iterations:,} iterations from {detector.start}"
        draw(val, detections, figure, title=title, leave_out=bad)
    record = append_result(
        run, "detect", score.numbers(), f"{detector.protocol}; {_test_protocol(detector.settings, val, len(bad))}",
        start=detector.start, settings=asdict(detector.settings), detector=str(detector.folder), boxes=score.box,
        masks=score.mask, classes=score.classes, detections=len(detections),
        faults=len(faults), faults_file=str(faults_file) if faults else None,
        figure=None if figure is None else str(figure), model_sha256=weights_digest(detector.model.state_dict()),
    )  # fmt: skip
    return DetectResult(**record)


def _training_protocol(s: DetectSettings, start: InitialWeights, chosen: CocoSet, total: int, world_size: int) -> str:
    """Describe how the detector was trained."""
    low, high = s.short_side
    norm = "synchronized over all ranks" if world_size > 1 else "of one rank"
    stem = start.spec.stem
    stem = "" if stem == "standard" else f", low-resolution stem {stem!r} brought to stride 4 by pooling"
    empty = f" ({total - len(chosen):,} without objects left out)" if total != len(chosen) else ""
    return (
        f"Mask R-CNN {start.spec.name}-FPN from {start.description}: every stage trained{stem}, batch norm in backbone "
        f"and FPN ({norm}), {s.width} channels, anchors from {s.anchor} px; {s.iterations:,} iterations of "
        f"{count(s.batch_size, 'image')}, SGD (momentum {s.momentum:g}, weight decay {s.weight_decay:g}), "
        f"learning rate {s.peak_lr:g} ({s.lr:g} × batch/16), ÷10 after {s.milestones[0]:,} and {s.milestones[1]:,}, "
        f"linear warm-up over {s.warmup:,}, short side {low}–{high} px (long side ≤ {s.long_side}), flips, "
        f"seed {s.seed}, on {count(len(chosen), 'image')}{empty} of {chosen.file}"
    )


def _test_protocol(s: DetectSettings, val: CocoSet, unreadable: int) -> str:
    """Describe how the detector was tested."""
    objects = sum(not one.crowd for number in range(len(val)) for one in val.objects[number])
    left_out = f", {unreadable} of them unreadable and left out" if unreadable else ""
    return (
        f"tested once, after the last iteration, at short side {s.short_side[1]} px on {count(len(val), 'image')} "
        f"({count(objects, 'object')}, {count(len(val.categories), 'class')}) of {val.file}"
        f"{left_out}; AP by pycocotools: IoU 0.50 to "
        "0.95, at most 100 detections per image, scores from 0.05"
    )
