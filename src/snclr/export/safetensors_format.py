"""safetensors: the run's own two files as a folder of their own, for every encoder there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.export.encoder import load_encoder, loading_snippet, save_encoder

FILE: str = ""
TOLERANCE: float = 1e-5


def refusal(spec: EncoderSpec) -> str | None:
    """None: every encoder fits."""
    return None


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Write encoder.safetensors and config.json anew, so that an altered config.json is not handed on."""
    save_encoder(encoder, spec, folder, extra=extra)


def reload(spec: EncoderSpec, folder: Path) -> nn.Module:
    """Load the folder as a run's; its description must be the encoder's."""
    encoder, described = load_encoder(folder)
    if described != spec:
        raise UserError("config.json describes another encoder")
    return encoder


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python lines that make `encoder` with timm or torchvision and safetensors."""
    return loading_snippet(spec, folder)
