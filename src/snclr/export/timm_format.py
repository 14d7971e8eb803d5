"""timm: a folder that timm's ``local-dir:`` reads, weights and settings together; its hub reads the same two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from snclr.encoders import EncoderSpec
from snclr.export.encoder import CONFIG_NAME, WEIGHTS_NAME, save_encoder, timm_reads_folder

FILE: str = ""
TOLERANCE: float = 1e-5

_WEIGHTS = "model.safetensors"  # the name timm and its hub look for first
_OLDEST = (1, 0, 26)


def refusal(spec: EncoderSpec) -> str | None:
    """Say why timm cannot read this encoder, or None."""
    import timm

    if spec.stem != "standard":
        return f"timm has no {spec.name} with the low-resolution stem {spec.stem!r}"
    if not timm_reads_folder(spec):
        return f"timm takes weights of {spec.architecture} without a classifier for an older layout and misreads them"
    if tuple(int(part) for part in timm.__version__.split(".")[:3]) < _OLDEST:
        return f"timm {timm.__version__} is installed; install timm 1.0.26 or newer"
    return None


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Write config.json, whose model_args hold what shapes do not show (a ViT's head count), and the weights."""
    import timm

    save_encoder(encoder, spec, folder, extra=extra)
    (folder / WEIGHTS_NAME).rename(folder / _WEIGHTS)
    config = json.loads((folder / CONFIG_NAME).read_bytes())
    # With these two names timm can add a classifier (num_classes=N) or take another number of channels (in_chans=N).
    known = timm.get_pretrained_cfg(spec.architecture)
    if known is not None and isinstance(known.classifier, str):
        config["pretrained_cfg"]["classifier"] = known.classifier
    if known is not None and isinstance(known.first_conv, str) and f"{known.first_conv}.weight" in encoder.state_dict():
        config["pretrained_cfg"]["first_conv"] = known.first_conv
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def reload(spec: EncoderSpec, folder: Path) -> nn.Module:
    """Let timm build the model from the folder and nothing else."""
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0)
    return model.eval()


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python lines that make `encoder` with timm alone."""
    address = f"local-dir:{folder}"
    return (
        "import timm\n"
        "\n"
        "# pretrained=True is what loads the weights; num_classes=N adds a new classifier\n"
        f"encoder = timm.create_model({address!r}, pretrained=True, num_classes=0)\n"
        "encoder.eval()\n"
    )
