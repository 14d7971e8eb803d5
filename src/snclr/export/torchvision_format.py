"""torchvision: the state dict of a ResNet without its classifier, in a .pth file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.export.resnet_layout import not_a_torchvision_resnet as refusal

__all__ = ["FILE", "TOLERANCE", "refusal", "reload", "snippet", "strict_resnet", "write"]

FILE: str = "encoder.pth"
TOLERANCE: float = 1e-5


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Write the state dict as it is: the encoder's keys are torchvision's."""
    torch.save({key: value.detach().contiguous() for key, value in encoder.state_dict().items()}, folder / FILE)


def reload(spec: EncoderSpec, folder: Path) -> nn.Module:
    """Load the file into torchvision's own model."""
    return strict_resnet(torch.load(folder / FILE, map_location="cpu", weights_only=True), spec)


def strict_resnet(state: dict[str, Tensor], spec: EncoderSpec) -> nn.Module:
    """Return torchvision's ResNet with these weights; only its classifier may be missing."""
    import torchvision

    model: nn.Module = torchvision.models.get_model(spec.architecture, weights=None)
    result = model.load_state_dict(state, strict=False)
    if set(result.missing_keys) != {"fc.weight", "fc.bias"} or result.unexpected_keys:
        raise UserError(f"missing {result.missing_keys[:3]}, not expected {result.unexpected_keys[:3]}")
    model.fc = nn.Identity()
    return model.eval()


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python lines that make `encoder` with torchvision alone."""
    return (
        "import torch\n"
        "import torchvision\n"
        "\n"
        f"encoder = torchvision.models.{spec.architecture}()\n"
        "encoder.fc = torch.nn.Identity()  # the classifier: put your own here after loading\n"
        f"encoder.load_state_dict(torch.load({str(folder / FILE)!r}, weights_only=True))\n"
        "encoder.eval()\n"
    )
