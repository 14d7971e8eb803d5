"""`snclr detect`: Mask R-CNN fine-tuned from a run on a COCO-format folder; AP for boxes and masks."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import one_voice, same_command
from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.detection.annotation_check import Fault
    from snclr.detection.coco_folder import CocoSet
    from snclr.detection.job import Detector
    from snclr.detection.schedule import DetectSettings
    from snclr.detection.start import Start

EXAMPLES = """examples:
  snclr detect runs/resnet50 --data coco/ --devices 8 --workers 4           # the paper's 1x protocol
  snclr detect runs/resnet50 --data coco/ --init random                     # the "Rand Init" row
  snclr detect runs/supervised --data coco/ --encoder resnet50 --init resnet50-0676ba61.pth   # "Supervised"
  snclr detect runs/photos --data pedestrians/ --recipe cpu                 # minutes, for a narrow ResNet
  snclr detect runs/photos --data other/ --detector runs/photos/detect-run-1a2b3c4d5e6f       # evaluate only

--data is a folder with COCO annotation files (annotations/instances_train2017.json …) and images; found by the usual
names, or given by flags. Every flag of the schedule changes the recipe. The same command again goes on where an
interrupted one stopped, and evaluates anew where it had finished.
"""


def detect(
    run: str | Path,
    *,
    data: str | Path,
    init: str = "run",
    encoder: str | None = None,
    recipe: str = "1x",
    iterations: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    short_side: tuple[int, int] | None = None,
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
    precision: str = "32",
    quiet: bool = False,
) -> dict[str, Any]:
    """Fine-tune a Mask R-CNN from a run and evaluate it; the result is also added to results.jsonl.

    Settings left at None are the recipe's. A stop (Ctrl-C, SIGTERM) saves, and gives a dict with `complete` False and
    an `exit_code`; the same call goes on. `detector` evaluates a finished one instead.
    """
    from snclr.detection.coco_folder import open_coco
    from snclr.detection.job import check_classes, faults_of, open_detector
    from snclr.detection.schedule import resolve
    from snclr.distributed import same_on_all, together
    from snclr.durable import check_writable
    from snclr.train.launch import start as launch
    from snclr.train.watch import TIMEOUT_SECONDS, watched

    settings = resolve(
        recipe, iterations=iterations, batch_size=batch_size, lr=lr, weight_decay=weight_decay, short_side=short_side,
        long_side=long_side, width=width, rois=rois, proposals=proposals, anchor=anchor, keep_empty=keep_empty,
        seed=seed,
    )  # fmt: skip
    fabric = launch(accelerator=accelerator, devices=devices, nodes=nodes, precision=precision)
    quiet = quiet or not fabric.is_global_zero
    run = Path(run)
    with one_voice(), watched(TIMEOUT_SECONDS):
        with together():
            train, val, words = open_coco(
                data, train_annotations=train_annotations, val_annotations=val_annotations, images=images,
                val_images=val_images, seed=settings.seed,
            )  # fmt: skip
            faults = faults_of(train, val, most=max_bad_share)
        for part in (train, val):
            same_on_all(part.fingerprint, f"images in {data}")
        _tell_faults(faults, quiet)
        finished: Detector | None
        if detector is not None:
            with together():
                finished = open_detector(Path(detector), fabric.device)
                if finished is None:
                    raise UserError(f"{detector} holds no finished detector; give a folder RUN/detect-… that has one")
                check_classes(Path(detector), val)
                if fabric.is_global_zero:
                    for place in (run, Path(detector)):
                        check_writable(place / "results", "the result goes there: copy it to a place you own")
        else:
            finished, stopped = _trained(
                run, init, encoder, train, settings, fabric, workers=workers, quiet=quiet, words=words
            )
            if stopped:
                return {"kind": "detect", "complete": False, **stopped}
        assert finished is not None
        return _evaluate(
            run, finished, val, faults, fabric, draw=draw, draw_score=draw_score, workers=workers, quiet=quiet
        )


def _trained(
    run: Path, init: str, encoder: str | None, train: CocoSet, settings: DetectSettings, fabric: Any, *, workers: int,
    quiet: bool, words: str,
) -> tuple[Detector | None, dict[str, Any] | None]:  # fmt: skip
    """The finished detector of these settings, trained now where it is not there yet; or how it was stopped."""
    from snclr.detection.job import describe, facts, folder_of, open_detector, prepare_training, training_set
    from snclr.detection.start import open_start
    from snclr.distributed import barrier, same_on_all, together
    from snclr.train.launch import check_batch

    with together():
        check_batch(settings.batch_size, fabric.world_size)
        start = open_start(run, init, encoder, settings.seed)
        chosen = training_set(train, settings)
        identity = describe(start, chosen, settings)
        folder = folder_of(run, start, identity)
        # Before the folder: an encoder that is no ResNet leaves nothing behind.
        job = prepare_training(start, chosen, settings, folder, identity, fabric, workers)
    same_on_all(lambda: start.sha256, f"weights in {run}")
    lock = None
    try:
        with together():
            if fabric.is_global_zero:
                lock = _locked(folder)
        with together():
            finished = open_detector(folder, fabric.device)
        if finished is None:
            stopped = _train(job, quiet=quiet, opening=_opening(start, settings, words, fabric))
            if stopped:
                return None, stopped
            job.finish(facts(start, chosen, len(train), settings, fabric.world_size))
            barrier()
            with together():
                finished = open_detector(folder, fabric.device)
        elif not quiet:
            print(f"already trained: {folder}; evaluating it", file=sys.stderr)
    finally:
        if lock is not None:
            lock.release()
    return finished, None


def _opening(start: Start, settings: DetectSettings, words: str, fabric: Any) -> str:
    return (
        f"fine-tuning a Mask R-CNN {start.spec.name}-FPN from {start.words} on {words}, {settings.iterations:,} "
        f"iterations of {settings.batch_size} images, on {fabric.device}"
        + (f" × {fabric.world_size}" if fabric.world_size > 1 else "")
    )


def _locked(folder: Path) -> Any:
    from snclr.detection.train import CHECKPOINTS
    from snclr.durable import FileLock, lock_folder, sweep

    lock = FileLock(folder / ".detect.lock")
    lock_folder(lock, "the same fine-tuning", "give a run in a place you own")
    sweep(folder / CHECKPOINTS)
    return lock


def _train(job: Any, *, quiet: bool, opening: str) -> dict[str, Any] | None:
    """Train; None at the end, or what to return where a stop was asked for."""
    from snclr.progress import Progress
    from snclr.train.signals import StopRequest

    s = job.settings
    with StopRequest() as stop, Progress("fine-tuning", s.iterations * s.batch_size, quiet=quiet) as progress:
        progress.say(opening)
        step = job.train(progress, stop)
        if step == s.iterations:
            return None
        assert stop.requested is not None
        return {
            "step": step, "total_steps": s.iterations, "stopped_by": stop.requested.name, "exit_code": stop.exit_code,
            "folder": str(job.folder),
        }  # fmt: skip


def _evaluate(
    run: Path, detector: Detector, val: CocoSet, faults: list[Fault], fabric: Any, *, draw: int, draw_score: float,
    workers: int, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """Detect on the validation images, score, draw, and write the result down."""
    from snclr.detection.scoring import average_precision, find_objects
    from snclr.distributed import broadcast_object, together

    found, bad = find_objects(
        detector.model, val, detector.settings, device=fabric.device, workers=workers, quiet=quiet
    )
    record: dict[str, Any] | None = None
    with together():
        if fabric.is_global_zero:
            score = average_precision(val, found, bad)
            faults = [*faults, *val.unreadable(bad, "left out"), *detector.unreadable]
            record = _record(run, detector, val, score, faults, bad, found, draw=draw, draw_score=draw_score)
    record = broadcast_object(record)
    assert record is not None
    return record


def _record(
    run: Path, detector: Detector, val: CocoSet, score: Any, faults: list[Fault], bad: dict[int, str], found: Any, *,
    draw: int, draw_score: float,
) -> dict[str, Any]:  # fmt: skip
    from snclr.detection.drawing import draw_predictions
    from snclr.detection.words import test_words, write_faults
    from snclr.evaluate.results import append_result
    from snclr.export.encoder import weights_digest

    run.mkdir(parents=True, exist_ok=True)
    faults_file, figure = detector.folder / "faults.jsonl", detector.folder / "predictions.png"
    write_faults(faults_file, faults)
    drawn = draw > 0 and len(bad) < len(val)
    if drawn:
        title = f"{detector.settings.iterations:,} iterations from {detector.start}"
        draw_predictions(val, found, figure, count=draw, score=draw_score, title=title, leave_out=bad)
    names = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
    return append_result(
        run, "detect", score.numbers(), f"{detector.words}; {test_words(detector.settings, val, len(bad))}",
        start=detector.start, settings=asdict(detector.settings), detector=str(detector.folder),
        boxes=dict(zip(names, score.box, strict=True)), masks=dict(zip(names, score.mask, strict=True)),
        classes=[asdict(one) for one in score.classes], detections=len(found), faults=len(faults),
        faults_file=str(faults_file) if faults else None, figure=str(figure) if drawn else None,
        model_sha256=weights_digest(detector.model.state_dict()),
    )  # fmt: skip


def _tell_faults(faults: list[Fault], quiet: bool) -> None:
    from snclr.detection.words import fault_lines

    if not quiet:
        for line in fault_lines(faults):
            print(line, file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder, the --out of snclr pretrain; results go there")
    add("--data", required=True, metavar="DIR", help="a COCO-format folder")
    add("--init", default="run", metavar="run|random|FILE", help="initial weights: the run's, new ones, or a file's")
    add("--encoder", metavar="NAME", help="with --init random or FILE: a ResNet by name, in place of the run's")
    group = parser.add_argument_group("schedule (default: the recipe's)")
    group.add_argument("--recipe", default="1x", metavar="NAME", help="1x, 2x (the field's) or cpu (small, in minutes)")
    for flag, kind, text in _SCHEDULE:
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--short-side", metavar="N|N-N", help="pixels, in training drawn from a range: 640-800")
    group.add_argument("--keep-empty", action="store_true", default=None, help="train on images without objects too")
    group = parser.add_argument_group("data")
    group.add_argument("--train-annotations", metavar="FILE", help="where it has no usual name")
    group.add_argument("--val-annotations", metavar="FILE", help="where it has no usual name")
    group.add_argument("--images", metavar="DIR", help="the images' folder")
    group.add_argument("--val-images", metavar="DIR", help="that of the validation images (default: --images)")
    group.add_argument(
        "--max-bad-share", type=float, default=0.1, metavar="X", help="stop above this share of unusable annotations"
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument("--detector", metavar="DIR", help="evaluate this finished RUN/detect-…; nothing is trained")
    group.add_argument("--draw", type=int, default=6, metavar="N", help="images in the figure of predictions")
    group.add_argument("--draw-score", type=float, default=0.5, metavar="X", help="lowest score that is drawn")
    group = parser.add_argument_group("where and how")
    group.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images (each)")
    group.add_argument("--accelerator", default="auto", help="auto, cpu or cuda")
    group.add_argument("--devices", default="1", metavar="N", help="processes on this machine, or auto")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    group.add_argument("--precision", default="32", help="32, or bf16 or 16 on GPUs")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


_SCHEDULE: tuple[tuple[str, type, str], ...] = (
    ("--iterations", int, "of one batch each; 90,000 in 1x"),
    ("--batch-size", int, "images an iteration, of all processes together; 16 in 1x"),
    ("--lr", float, "learning rate for 16 images, × batch/16; 0.02 in 1x"),
    ("--weight-decay", float, "of all weights; 1e-4 in 1x"),
    ("--long-side", int, "the most pixels; 1333 in 1x"),
    ("--width", int, "channels of the feature pyramid and the heads; 256 in 1x"),
    ("--rois", int, "regions an image that train the box head; 512 in 1x"),
    ("--proposals", int, "proposals an image in training; 2000 in 1x"),
    ("--anchor", int, "side of the smallest anchors in pixels; 32 in 1x"),
    ("--seed", int, "of new weights, order, sizes and flips (default: 0)"),
)


def _run(a: argparse.Namespace) -> int:
    from snclr.detection.schedule import parse_short_side
    from snclr.detection.words import table
    from snclr.distributed import rank_and_size

    flags = {key: value for key, value in vars(a).items() if key not in ("handler", "json", "run")}
    flags["short_side"] = None if a.short_side is None else parse_short_side(a.short_side)
    record = detect(a.run, **flags, quiet=a.json)
    if rank_and_size()[0]:
        return int(record.get("exit_code", 0))
    if record.get("complete", True):
        print(json.dumps(record) if a.json else table(record))
        return 0
    if a.json:
        print(json.dumps(record))
    print(
        f"stopped by {record['stopped_by']} after iteration {record['step']} of {record['total_steps']}; everything is "
        f"saved. Go on with the same command:\n  {same_command(a)}",
        file=sys.stderr,
    )
    return int(record["exit_code"])
