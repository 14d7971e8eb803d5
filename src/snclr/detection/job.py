"""One fine-tuning put together: its data, its folder, its model; or a finished detector, opened again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torchvision.models.detection import MaskRCNN

from snclr.detection.annotation_check import Fault
from snclr.detection.coco_folder import CocoSet, check_share
from snclr.detection.model import build_detector
from snclr.detection.schedule import DetectSettings
from snclr.detection.start import Start
from snclr.detection.train import FINISHED, DetectorTraining
from snclr.detection.words import set_words, training_words
from snclr.encoders import EncoderSpec, build_encoder
from snclr.errors import UserError
from snclr.train import state
from snclr.train.checkpoint import latest_checkpoint


@dataclass(frozen=True)
class Detector:
    """A trained detector, and what is to be said of it."""

    model: MaskRCNN
    settings: DetectSettings
    folder: Path
    start: str
    words: str
    unreadable: list[Fault]
    """Images of its own training set that could not be read."""


def training_set(train: CocoSet, settings: DetectSettings) -> CocoSet:
    """The images that are trained on; UserError where they are too few for a batch."""
    chosen = train.trained_on(keep_empty=settings.keep_empty)
    if len(chosen) < settings.batch_size:
        raise UserError(
            f"{train.file} has {len(chosen)} images to train on, fewer than one batch of {settings.batch_size}; "
            f"give --batch-size {max(1, len(chosen))} or less"
        )
    return chosen


def describe(start: Start, chosen: CocoSet, settings: DetectSettings) -> dict[str, Any]:
    """All that decides the outcome of a training, as JSON values: what a checkpoint must be of."""
    identity = {
        "settings": asdict(settings),
        "start": start.sha256,
        "encoder": start.spec.to_dict(),
        "data": chosen.fingerprint(),
        "categories": [[key, name] for key, name in chosen.categories.items()],
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    return plain


def folder_of(run: Path, start: Start, identity: dict[str, Any]) -> Path:
    """A folder of its own for each different fine-tuning."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return run / f"detect-{start.tag}-{digest[:12]}"


def prepare_training(
    start: Start, chosen: CocoSet, settings: DetectSettings, folder: Path, identity: dict[str, Any], fabric: Any,
    workers: int,
) -> DetectorTraining:  # fmt: skip
    """The model with its new heads, ready to train."""
    torch.manual_seed(settings.seed)
    model = build_detector(start.encoder, start.spec, len(chosen.categories), settings)
    return DetectorTraining(model, chosen, settings, folder, identity, fabric, workers)


def facts(start: Start, chosen: CocoSet, of: int, settings: DetectSettings, processes: int) -> dict[str, Any]:
    """What a finished detector carries with it for later evaluations."""
    trained = set_words(chosen, of)
    words = training_words(settings, start.spec, start.words, trained, processes)
    return {"start": start.words, "words": words}


def open_detector(folder: Path, device: torch.device) -> Detector | None:
    """The finished detector of a folder, or None where there is none yet."""
    found = latest_checkpoint(folder / FINISHED, lambda text: None) if (folder / FINISHED).is_dir() else None
    if found is None:
        return None
    identity = found.info["identity"]
    given = identity["settings"]
    settings = DetectSettings(**{**given, "short_side": tuple(given["short_side"])})
    spec = EncoderSpec.from_dict(identity["encoder"])
    model = build_detector(build_encoder(spec), spec, len(identity["categories"]), settings)
    state.load_method_state(found.tensors, model)
    unreadable = [Fault(**entry) for entry in found.info.get("unreadable", ())]
    return Detector(model.to(device).eval(), settings, folder, found.info["start"], found.info["words"], unreadable)


def check_classes(folder: Path, val: CocoSet) -> None:
    """Refuse to test a finished detector on other classes than its own."""
    found = latest_checkpoint(folder / FINISHED, lambda text: None)
    assert found is not None
    own = {int(key): str(name) for key, name in found.info["identity"]["categories"]}
    if own != val.categories:
        raise UserError(
            f"the detector in {folder} was trained on the classes {', '.join(own.values())}; {val.file} has "
            f"{', '.join(val.categories.values())}, or other ids"
        )


def faults_of(*sets: CocoSet, most: float) -> list[Fault]:
    """The faults of the sets, each once; UserError where they are too many to go on."""
    for coco in sets:
        check_share(coco, most)
    return list(dict.fromkeys(fault for coco in sets for fault in coco.faults))
