"""Evaluate one run: kNN and linear accuracy on the same features, fine-tuning on few labels, and detection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snclr.checkpoint.encoder_file import load_encoder
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.splits import hold_out, open_splits, take
from snclr.data.validation_split import FIT, VALIDATION, VALIDATION_SHARE, split_part
from snclr.distributed.collectives import rank_and_size
from snclr.distributed.launch import launch
from snclr.evaluation.detection.evaluate import evaluate_detection
from snclr.evaluation.detection.settings import resolve as resolve_detection
from snclr.evaluation.features import extract_features
from snclr.evaluation.finetune import evaluate_finetune
from snclr.evaluation.knn import knn
from snclr.evaluation.linear import evaluate_linear, linear_cached
from snclr.evaluation.results import append_result
from snclr.evaluation.scoring import match_labels
from snclr.evaluation.session import open_session
from snclr.runtime.device import pick_device
from snclr.train.config import PretrainConfig, resolve

EVALUATION_SEED = 0
"""Seed of linear probe and fine-tuning, with the labeled subset: the same for every row and seed."""
_HELD_OUT = f"{VALIDATION_SHARE:.0%} of each training class held out for tuning"


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a run by the measures of its job; return numbers and protocols by name.

    Tuning runs have kNN only, on a part of the training set. A stop raises StopRequested; the same call continues.
    """
    evaluation, config = job["evaluation"], resolve(job["given"])
    wanted = ["knn"] if evaluation["kind"] == "validation" else list(evaluation["measures"])
    numbers, protocols = _on_features(job, config, wanted)
    for measure in wanted:
        found = {}
        if measure == "linear-paper":
            found = _linear_paper(job, config)
        elif measure.startswith("finetune-"):
            found = _finetune(job, config, measure.removeprefix("finetune-"))
        elif measure == "detect":
            found = _detect(job, config)
        numbers |= found.get("numbers", {})
        protocols |= {measure: _without_paths(job, found["protocol"])} if found else {}
    return {"numbers": numbers, "protocols": protocols}


def _on_features(job: dict[str, Any], config: PretrainConfig, wanted: list[str]) -> tuple[dict[str, Any], ...]:
    """Evaluate kNN and the cached linear probe on features that are extracted once."""
    evaluation = job["evaluation"]
    train, test, description = _open_parts(job)
    description = _without_paths(job, description)
    encoder, spec = load_encoder(Path(job["folder"]))
    train_labels, test_labels = match_labels(train, test)
    options: dict[str, Any] = {
        "image_size": spec.image_size, "workers": 0, "quiet": True, "device": pick_device(config.device)
    }  # fmt: skip
    a = extract_features(encoder, train, labels=train_labels, **options)
    b = extract_features(encoder, test, labels=test_labels, **options)
    sets = (a.features, a.labels, b.features, b.labels)
    results: dict[str, Any] = {
        "knn": knn(*sets, k=evaluation["k"], temperature=evaluation["temperature"], data=description)
    }
    if "linear" in wanted:
        results["linear"] = linear_cached(*sets, data=description)
    for name, result in results.items() if rank_and_size()[0] == 0 else ():
        kind = "linear-cached" if name == "linear" else name
        append_result(job["folder"], kind, result.numbers, result.protocol)
    numbers = {key: v for name, one in results.items() for key, v in _accuracies(name, one.top1, one.top5).items()}
    return numbers, {name: result.protocol for name, result in results.items()}


def _open_parts(job: dict[str, Any]) -> tuple[ImageDataset, ImageDataset, str]:
    """Open the images to classify with and those to classify: training and test split, or for tuning validation."""
    evaluation, data = job["evaluation"], job["evaluation"]["data"] or job["given"]["data"]
    name, part = split_part(data)
    if evaluation["kind"] == "validation" and part == FIT:
        train, test = (open_dataset(name + ending, download=True) for ending in (FIT, VALIDATION))
        return train, test, f"{name}, {_HELD_OUT}, not trained on; test split not used"
    train, test, description = open_splits(data, evaluation["test"])
    if evaluation["kind"] != "validation":
        return train, test, description
    labels, _ = match_labels(train, train)
    kept, held = hold_out(labels, VALIDATION_SHARE, seed=0)
    return take(train, kept), take(train, held), f"{description}, {_HELD_OUT}; test split not used"


def _session(job: dict[str, Any], config: PretrainConfig) -> Any:
    return open_session(
        job["folder"], workers=config.workers, device=config.device, devices=config.devices, nodes=config.nodes,
        quiet=True,
    )  # fmt: skip


def _images(job: dict[str, Any]) -> dict[str, Any]:
    evaluation = job["evaluation"]
    return {"data": evaluation["data"] or job["given"]["data"], "test": evaluation["test"]}


def _linear_paper(job: dict[str, Any], config: PretrainConfig) -> dict[str, Any]:
    """Train the linear classifier with the paper's protocol: random crops through the frozen encoder."""
    with _session(job, config) as session:
        result = evaluate_linear(
            session, **_images(job), protocol="paper", epochs=None, batch_size=None, lr=None, seed=EVALUATION_SEED,
            baselines=False,
        )  # fmt: skip
    return {"numbers": _accuracies("linear", result.top1, result.top5), "protocol": result.protocol}


def _finetune(job: dict[str, Any], config: PretrainConfig, percent: str) -> dict[str, Any]:
    """Fine-tune on a percentage of the labels, with the defaults of `snclr finetune`."""
    with _session(job, config) as session:
        result = evaluate_finetune(
            session, **_images(job), labels=f"{percent}%", from_scratch=False, epochs=None, batch_size=256, lr=0.05,
            head_lr=None, weight_decay=0.0, seed=EVALUATION_SEED, baselines=False,
        )  # fmt: skip
    return {"numbers": _accuracies(f"finetune{percent}", result.top1, result.top5), "protocol": result.protocol}


def _detect(job: dict[str, Any], config: PretrainConfig) -> dict[str, Any]:
    """Fine-tune Mask R-CNN on the COCO data of the study."""
    evaluation = job["evaluation"]
    fabric = launch(accelerator=config.device, devices=config.devices, nodes=config.nodes, precision="32")
    settings = resolve_detection(evaluation["detect_recipe"])
    record = evaluate_detection(
        Path(job["folder"]), fabric, settings, data=evaluation["coco"], init="run", encoder=None, max_bad_share=0.1,
        detector=None, draw=None, workers=config.workers, quiet=True,
    )  # fmt: skip
    numbers = {name: value for name, value in record["numbers"].items() if value is not None}
    return {"numbers": numbers, "protocol": record["protocol"]}


def _accuracies(name: str, top1: float, top5: float | None) -> dict[str, float]:
    return {name: top1} if top5 is None else {name: top1, f"{name}_top5": top5}


def _without_paths(job: dict[str, Any], text: str) -> str:
    """Replace local paths by names: records are shared."""
    evaluation = job["evaluation"]
    paths = (evaluation["data"], job["given"]["data"], evaluation["test"], evaluation["coco"], job["folder"])
    for path in sorted({split_part(path)[0] for path in paths if path}, key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text
