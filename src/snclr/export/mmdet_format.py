"""mmdet (MMDetection): its ResNet has torchvision's names, in a .pth file under "state_dict"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from snclr.data.views import MEAN, STD
from snclr.encoders import EncoderSpec
from snclr.export.resnet_layout import LAYOUTS, check_table, not_a_torchvision_resnet, torchvision_names
from snclr.export.torchvision_format import strict_resnet

FILE: str = "encoder.pth"
TOLERANCE: float = 1e-5


def refusal(spec: EncoderSpec) -> str | None:
    """Say why mmdet has no such ResNet, or None."""
    if reason := not_a_torchvision_resnet(spec):
        return reason
    layout = LAYOUTS[spec.architecture]
    if layout.groups == 1 and layout.width != 64:
        return f"mmdet's ResNet and ResNeXt have no form as wide as {spec.name}"
    return None


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Write the backbone's state dict in the form of an mmdet checkpoint."""
    state = {key: value.detach().contiguous() for key, value in encoder.state_dict().items()}
    torch.save({"state_dict": state, "meta": {"author": "snclr", "encoder": spec.architecture}}, folder / FILE)


def reload(spec: EncoderSpec, folder: Path) -> nn.Module:
    """Check keys and shapes against mmdet's ResNet, then run the same network in torchvision.

    With style='pytorch' the stride is on the 3×3 convolution, as in torchvision: the two compute the same.
    """
    state = torch.load(folder / FILE, map_location="cpu", weights_only=True)["state_dict"]
    check_table(state, LAYOUTS[spec.architecture], torchvision_names)
    return strict_resnet(state, spec)


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return the lines of an mmdet 3 config file."""
    layout = LAYOUTS[spec.architecture]
    kind = '"ResNet"' if layout.groups == 1 else f'"ResNeXt", groups={layout.groups}, base_width={layout.width}'
    mean, std = ([round(255 * value, 3) for value in values] for values in (MEAN, STD))
    return (
        "# in an mmdet 3 config, after the _base_ of your detector\n"
        "model = dict(\n"
        f"    data_preprocessor=dict(mean={mean}, std={std}, bgr_to_rgb=True),\n"
        "    backbone=dict(\n"
        f'        type={kind}, depth={layout.depth}, style="pytorch",  # stride on the 3×3 convolution\n'
        "        frozen_stages=-1,\n"
        "        # on one GPU: BN. Frozen statistics (norm_eval=True) do not suit weights trained without labels\n"
        '        norm_cfg=dict(type="SyncBN", requires_grad=True), norm_eval=False,\n'
        f'        init_cfg=dict(type="Pretrained", checkpoint={str(folder / FILE)!r}),\n'
        "    ),\n"
        ")\n"
    )
