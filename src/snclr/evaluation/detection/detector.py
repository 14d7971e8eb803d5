"""The initial weights of a detector, and a trained detector on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models.detection import MaskRCNN

from snclr.checkpoint import state
from snclr.checkpoint.encoder_file import WEIGHTS_NAME, load_encoder
from snclr.checkpoint.external_weights import read_weights
from snclr.checkpoint.format import latest_checkpoint, save_checkpoint
from snclr.errors import UserError
from snclr.evaluation.detection.annotations import Fault
from snclr.evaluation.detection.model import build_detector
from snclr.evaluation.detection.settings import DetectSettings
from snclr.evaluation.detection.task import DetectionTask
from snclr.models.encoders import EncoderSpec, build_encoder, resolve_encoder

_FINISHED = "detector"  # sub-folder of a trained detector
_IMAGE_SIZE = 224  # of an encoder given by name: decides its stem, which is the standard one


@dataclass(frozen=True)
class InitialWeights:
    """An encoder for a detector, and the origin of its weights."""

    encoder: nn.Module
    spec: EncoderSpec
    tag: str
    """"run", "random" or "file"."""
    description: str


def load_initial_weights(run: Path, init: str, encoder: str | None, seed: int) -> InitialWeights:
    """Load the run's encoder, or one given by name, with the weights chosen by `init`."""
    if encoder is not None and init == "run":
        raise UserError(f"--encoder {encoder} needs --init random or --init FILE; a run has an encoder of its own")
    if encoder is not None:
        spec = resolve_encoder(encoder, image_size=_IMAGE_SIZE)
    elif (run / WEIGHTS_NAME).is_file() or init == "run":
        loaded, spec = load_encoder(run)
        if init == "run":
            return InitialWeights(loaded, spec, "run", f"the weights of {run}")
    else:
        raise UserError(f"{run} has no encoder; give an architecture by name, such as --encoder resnet50")
    torch.manual_seed(seed + 1_000_003)  # different from the seed of the heads
    made = build_encoder(spec)
    if init == "random":
        return InitialWeights(made, spec, "random", f"random weights (seed {seed})")
    made.load_state_dict(read_weights(init, spec).state)
    return InitialWeights(made, spec, "file", f"the weights of {init}")


@dataclass(frozen=True)
class Detector:
    """A trained detector and its description."""

    model: MaskRCNN
    settings: DetectSettings
    folder: Path
    start: str
    """Origin of the initial weights."""
    protocol: str
    categories: dict[int, str]
    unreadable: list[Fault]
    """Unreadable images of its training set."""


def save_detector(task: DetectionTask, folder: Path, identity: dict[str, Any], *, start: str, protocol: str) -> None:
    """Write a trained detector to a sub-folder of `folder`."""
    tensors = {f"method/{name}": value for name, value in task.model.state_dict().items()}
    # With file names, because the detector may be evaluated on another dataset.
    unreadable = [asdict(fault) for fault in task.coco.unreadable(task.bad, "replaced")]
    info = {"identity": identity, "unreadable": unreadable, "start": start, "protocol": protocol}
    save_checkpoint(folder / _FINISHED, tensors, info, step=task.total_steps, keep=1)


def open_detector(folder: Path, device: torch.device) -> Detector | None:
    """Open the trained detector of a folder; return None if there is none."""
    checkpoint = latest_checkpoint(folder / _FINISHED, lambda text: None) if (folder / _FINISHED).is_dir() else None
    if checkpoint is None:
        return None
    info, identity = checkpoint.info, checkpoint.info["identity"]
    given = identity["settings"]
    settings = DetectSettings(**{**given, "short_side": tuple(given["short_side"])})
    spec = EncoderSpec.from_dict(identity["encoder"])
    categories = {int(key): str(name) for key, name in identity["categories"]}
    model = build_detector(build_encoder(spec), spec, len(categories), settings)
    state.load_method_state(checkpoint.tensors, model)
    unreadable = [Fault(**entry) for entry in info.get("unreadable", ())]
    model.to(device).eval()
    protocol = info["protocol"] if "protocol" in info else info["words"]  # its name in earlier versions
    return Detector(model, settings, folder, info["start"], protocol, categories, unreadable)
