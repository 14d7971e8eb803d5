"""Evaluate one run: kNN and linear accuracy on the same features, fine-tuning on few labels, and detection."""

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
Found = tuple[dict[str, float], str]
"""Numbers by name, and the protocol of a measure."""
_HELD_OUT = f"{VALIDATION_SHARE:.0%} of each training class held out for tuning"


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a run by the measures of its job; return numbers and protocols by name.

    Tuning runs have kNN only, on a part of the training set. A stop raises StopRequested; the same call continues.
    """
    evaluation, config = job["evaluation"], resolve(job["given"])
    wanted = ["knn"] if evaluation["kind"] == "validation" else list(evaluation["measures"])
    found = _on_features(job, config, wanted)
    for measure in wanted:
        if measure not in found:
            numbers, protocol = (_detect if measure == "detect" else _train_classifier)(job, config, measure)
            found[measure] = numbers, _without_paths(job, protocol)
    return {
        "numbers": {name: value for numbers, _ in found.values() for name, value in numbers.items()},
        "protocols": {measure: protocol for measure, (_, protocol) in found.items()},
    }


def _on_features(job: dict[str, Any], config: PretrainConfig, wanted: list[str]) -> dict[str, Found]:
    """Evaluate kNN and the cached linear probe on features that are extracted once."""
    evaluation = job["evaluation"]
    train, test, description = _open_parts(job)
    encoder, spec = load_encoder(Path(job["folder"]))
    device = pick_device(config.device)
    a, b = (
        extract_features(encoder, part, image_size=spec.image_size, device=device, labels=labels, quiet=True)
        for part, labels in zip((train, test), match_labels(train, test), strict=True)
    )
    sets, data = (a.features, a.labels, b.features, b.labels), _without_paths(job, description)
    results: dict[str, Any] = {
        "knn": knn(*sets, k=evaluation["k"], temperature=evaluation["temperature"], data=data)
    }  # fmt: skip
    if "linear" in wanted:
        results["linear"] = linear_cached(*sets, data=data)
    for name, result in results.items() if rank_and_size()[0] == 0 else ():
        kind = "linear-cached" if name == "linear" else name
        append_result(job["folder"], kind, result.numbers, result.protocol, data=data, **result.context)
    return {name: (_accuracies(name, result), result.protocol) for name, result in results.items()}


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


def _train_classifier(job: dict[str, Any], config: PretrainConfig, measure: str) -> Found:
    """Train a linear classifier with the paper's protocol, or fine-tune on a percentage of the labels."""
    evaluation = job["evaluation"]
    images = {"data": evaluation["data"] or job["given"]["data"], "test": evaluation["test"]}
    with open_session(
        job["folder"], workers=config.workers, device=config.device, devices=config.devices, nodes=config.nodes,
        quiet=True,
    ) as session:  # fmt: skip
        if measure == "linear-paper":
            linear = evaluate_linear(
                session, **images, protocol="paper", epochs=None, batch_size=None, lr=None, seed=EVALUATION_SEED,
                baselines=False,
            )  # fmt: skip
            return _accuracies("linear", linear), linear.protocol
        percent = measure.removeprefix("finetune-")
        tuned = evaluate_finetune(  # with the defaults of `snclr finetune`
            session, **images, labels=f"{percent}%", from_scratch=False, epochs=None, batch_size=256, lr=0.05,
            head_lr=None, weight_decay=0.0, seed=EVALUATION_SEED, baselines=False,
        )  # fmt: skip
        return _accuracies(f"finetune{percent}", tuned), tuned.protocol


def _detect(job: dict[str, Any], config: PretrainConfig, _: str) -> Found:
    """Fine-tune Mask R-CNN on the COCO data of the study."""
    evaluation = job["evaluation"]
    fabric = launch(device=config.device, devices=config.devices, nodes=config.nodes, precision="32")
    result = evaluate_detection(
        Path(job["folder"]), fabric, resolve_detection(evaluation["detect_recipe"]), data=evaluation["coco"],
        init="run", encoder=None, max_bad_share=0.1, detector=None, draw=None, workers=config.workers, quiet=True,
    )  # fmt: skip
    return {name: value for name, value in result.numbers.items() if value is not None}, result.protocol


def _accuracies(name: str, result: Any) -> dict[str, float]:
    return {name: result.top1} | ({} if result.top5 is None else {f"{name}_top5": result.top5})


def _without_paths(job: dict[str, Any], text: str) -> str:
    """Replace local paths by names: records are shared."""
    evaluation = job["evaluation"]
    paths = (evaluation["data"], job["given"]["data"], evaluation["test"], evaluation["coco"], job["folder"])
    for path in sorted({split_part(path)[0] for path in paths if path}, key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text
