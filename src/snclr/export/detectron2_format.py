"""detectron2: a .pkl file of numpy arrays under detectron2's own names, as its model zoo has them.

A pickle is what detectron2 reads, and numpy's own pickles are tied to a numpy version: those of numpy 2 do not open in
numpy 1.25, which many detectron2 installations have. So arrays are written as a call of `numpy.ndarray` on their bytes,
the one name the file refers to; the check opens it with a reader that knows no other name.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.data.views import MEAN, STD
from snclr.encoders import EncoderSpec
from snclr.export.resnet_layout import (
    LAYOUTS,
    check_table,
    convolutions,
    detectron2_names,
    keys,
    torchvision_names,
)
from snclr.export.resnet_layout import not_a_torchvision_resnet as refusal

__all__ = ["FILE", "TOLERANCE", "read_pickle", "refusal", "reload", "snippet", "write"]

FILE: str = "encoder.pkl"
TOLERANCE: float = 1e-5


class _Pickler(pickle.Pickler):
    """Writes an array as numpy.ndarray(shape, dtype, bytes): the same in every numpy, and writable once read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ndarray, (value.shape, value.dtype.str, bytearray(np.ascontiguousarray(value).tobytes()))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads such a file and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("builtins", "bytearray")):
            return np.ndarray if module == "numpy" else bytearray
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Rename every tensor and write them in the form of detectron2's model zoo."""
    state = encoder.state_dict()
    model: dict[str, np.ndarray[Any, Any]] = {}
    for convolution in convolutions(LAYOUTS[spec.architecture]):
        pairs = zip(keys(convolution, torchvision_names), keys(convolution, detectron2_names), strict=True)
        model |= {theirs: state[ours].detach().cpu().numpy() for ours, theirs in pairs}
    content = {"model": model, "__author__": "snclr", "matching_heuristics": True}
    with (folder / FILE).open("wb") as file:
        _Pickler(file, protocol=5).dump(content)


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write`; a pickle that refers to anything but arrays is refused."""
    content = _Unpickler(io.BytesIO(path.read_bytes())).load()
    assert isinstance(content, dict)
    return content


def reload(spec: EncoderSpec, folder: Path) -> Callable[[Tensor], Tensor]:
    """Check keys and shapes against detectron2's ResNet and return that network, computed from its own names."""
    weights = {key: torch.from_numpy(value) for key, value in read_pickle(folder / FILE)["model"].items()}
    check_table(weights, LAYOUTS[spec.architecture], detectron2_names)
    return lambda images: _features(weights, images)


def _features(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """Pooled res5 of detectron2's ResNet with STRIDE_IN_1X1 False: images (N, 3, S, S) to (N, D).

    Written from the architecture and by detectron2's names, so that a tensor under the wrong name shows.
    """

    def layer(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{name}.weight"]
        groups = x.shape[1] // kernel.shape[1]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
        mean, variance, scale, shift = (
            weights[f"{name}.norm.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, variance, scale, shift)

    x = F.max_pool2d(F.relu(layer(images, "stem.conv1", 2)), 3, 2, 1)
    for stage in (2, 3, 4, 5):
        for block in itertools.count():
            name = f"res{stage}.{block}"
            if f"{name}.conv1.weight" not in weights:
                break
            stride = 2 if stage > 2 and block == 0 else 1
            shortcut = layer(x, f"{name}.shortcut", stride) if f"{name}.shortcut.weight" in weights else x
            if f"{name}.conv3.weight" in weights:
                y = F.relu(layer(F.relu(layer(x, f"{name}.conv1")), f"{name}.conv2", stride))
                x = F.relu(layer(y, f"{name}.conv3") + shortcut)
            else:
                x = F.relu(layer(F.relu(layer(x, f"{name}.conv1", stride)), f"{name}.conv2") + shortcut)
    return x.mean(dim=(2, 3))


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return the settings detectron2 needs for this file; its defaults are for other weights (BGR, std 1)."""
    layout = LAYOUTS[spec.architecture]
    mean, std = ([round(255 * value, 3) for value in values] for values in (MEAN, STD))
    resnets = [f"DEPTH = {layout.depth}"]
    if layout.depth < 50:
        resnets.append("RES2_OUT_CHANNELS = 64")
    if layout.groups > 1 or layout.width != 64:
        resnets += [f"NUM_GROUPS = {layout.groups}", f"WIDTH_PER_GROUP = {layout.width}"]
    lines = [
        "from detectron2 import model_zoo",
        "from detectron2.config import get_cfg",
        "",
        "cfg = get_cfg()",
        'cfg.merge_from_file(model_zoo.get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"))',
        f"cfg.MODEL.WEIGHTS = {str(folder / FILE)!r}",
        'cfg.INPUT.FORMAT = "RGB"  # the default is BGR',
        f"cfg.MODEL.PIXEL_MEAN = {mean}  # in the order R, G, B",
        f"cfg.MODEL.PIXEL_STD = {std}",
        *(f"cfg.MODEL.RESNETS.{line}" for line in resnets),
        "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False  # the stride is on the 3×3 convolution",
        'cfg.MODEL.RESNETS.NORM = "SyncBN"  # "BN" on one GPU; the default, FrozenBN, does not suit these weights',
        "cfg.MODEL.BACKBONE.FREEZE_AT = 0",
    ]
    return "\n".join(lines) + "\n"
