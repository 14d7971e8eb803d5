"""ResNets for torchvision, mmdet and detectron2: one state dict, in three files."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError
from snclr.exporters.format import Format
from snclr.models.encoders import EncoderSpec
from snclr.models.names import TORCHVISION_RESNETS


class Torchvision(Format):
    """A .pth file with the state dict of a ResNet without its classifier. Base of the other two formats."""

    file = "encoder.pth"
    template = """\
import torch
import torchvision

encoder = torchvision.models.{spec.architecture}()
encoder.fc = torch.nn.Identity()  # put your classifier here after loading
weights = {path!r}
encoder.load_state_dict(torch.load(weights, weights_only=True))
encoder.eval()
"""

    def save(self, state: dict[str, Tensor], path: Path) -> None:
        """Write a state dict with torchvision's keys."""
        torch.save(state, path)

    def load(self, path: Path) -> dict[str, Tensor]:
        """Read a file of `save`; return the state dict with torchvision's keys."""
        return dict(torch.load(path, map_location="cpu", weights_only=True))

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Refuse encoders that are not one of torchvision's ResNets."""
        if spec.library != "torchvision":
            return f"{spec.name} is not one of torchvision's ResNets ({', '.join(TORCHVISION_RESNETS)})"
        if spec.stem != "standard":
            return f"{spec.name} was trained with the low-resolution stem {spec.stem!r} instead of the 7×7 stem"
        return None

    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Write the state dict."""
        self.save({key: value.detach().contiguous() for key, value in encoder.state_dict().items()}, folder / self.file)

    def reload(self, spec: EncoderSpec, folder: Path) -> nn.Module:
        """Load the file into torchvision's model; all tensors except the classifier's must be present."""
        model: nn.Module = torchvision.models.get_model(spec.architecture, weights=None)
        model.fc = nn.Identity()
        missing, unexpected = model.load_state_dict(self.load(folder / self.file), strict=False)
        if missing or unexpected:
            raise UserError(f"missing keys {missing[:3]}, unexpected keys {unexpected[:3]}")
        return model.eval()

    def snippet(self, spec: EncoderSpec, folder: Path, **fields: Any) -> str:
        """Return the code or settings that load the file."""
        depth, groups, width = resnet_layout(spec.architecture)
        fields |= {
            "mean": [round(255 * value, 3) for value in MEAN],
            "std": [round(255 * value, 3) for value in STD],
            "res2_channels": 64 if depth < 50 else 256,
            "mmdet_type": '"ResNet"' if groups == 1 else f'"ResNeXt", groups={groups}, base_width={width}',
        }
        return super().snippet(spec, folder, depth=depth, groups=groups, width=width, **fields)


class MMDet(Torchvision):
    """A .pth checkpoint with torchvision's keys: with style="pytorch" mmdet's ResNet is torchvision's."""

    takes = None
    template = """\
# mmdet 3 config, after the _base_ of your detector
model = dict(
    data_preprocessor=dict(mean={mean}, std={std}, bgr_to_rgb=True),
    backbone=dict(
        type={mmdet_type}, depth={depth}, style="pytorch",  # stride on the 3×3 convolution
        frozen_stages=-1,
        # BN on one GPU; norm_eval=True (frozen statistics) is for supervised weights
        norm_cfg=dict(type="SyncBN", requires_grad=True), norm_eval=False,
        init_cfg=dict(type="Pretrained", checkpoint={path!r}),
    ),
)
"""

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Refuse wide ResNets too."""
        wide = f"mmdet has no ResNet as wide as {spec.name}" if spec.architecture.startswith("wide") else None
        return super().refusal(spec) or wide

    def save(self, state: dict[str, Tensor], path: Path) -> None:
        """Write the state dict as an mmdet checkpoint."""
        torch.save({"state_dict": state, "meta": {"author": "snclr"}}, path)

    def load(self, path: Path) -> dict[str, Tensor]:
        """Read the state dict of a checkpoint."""
        return dict(super().load(path)["state_dict"])


class Detectron2(Torchvision):
    """A .pkl file of numpy arrays under detectron2's names, as in its model zoo."""

    file = "encoder.pkl"
    takes = None
    template = """\
from detectron2 import model_zoo
from detectron2.config import get_cfg

cfg = get_cfg()
cfg.merge_from_file(model_zoo.get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"))
cfg.MODEL.WEIGHTS = {path!r}
cfg.INPUT.FORMAT = "RGB"  # the default is BGR
cfg.MODEL.PIXEL_MEAN = {mean}  # in the order R, G, B
cfg.MODEL.PIXEL_STD = {std}
cfg.MODEL.RESNETS.DEPTH = {depth}
cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = {res2_channels}
cfg.MODEL.RESNETS.NUM_GROUPS = {groups}
cfg.MODEL.RESNETS.WIDTH_PER_GROUP = {width}
cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False  # the stride is on the 3×3 convolution
cfg.MODEL.RESNETS.NORM = "SyncBN"  # "BN" on one GPU; the default FrozenBN is for supervised weights
cfg.MODEL.BACKBONE.FREEZE_AT = 0
"""

    def save(self, state: dict[str, Tensor], path: Path) -> None:
        """Rename all tensors and write them as in detectron2's model zoo."""
        model = {detectron2_key(key): value.cpu().numpy() for key, value in state.items()}
        with path.open("wb") as file:
            _Pickler(file, protocol=5).dump({"model": model, "__author__": "snclr", "matching_heuristics": True})

    def load(self, path: Path) -> dict[str, Tensor]:
        """Read the file of `save` and rename all tensors back."""
        with path.open("rb") as file:
            model = pickle.load(file)["model"]  # just written here
        return {torchvision_key(key): torch.from_numpy(value) for key, value in model.items()}


def resnet_layout(architecture: str) -> tuple[int, int, int]:
    """Return the depth of a ResNet, and the groups and channels per group of its 3×3 convolutions.

    >>> resnet_layout("resnext50_32x4d")
    (50, 32, 4)
    """
    with torch.device("meta"):
        model: Any = torchvision.models.get_model(architecture, weights=None)
    return int(re.findall(r"\d+", architecture)[0]), model.groups, model.base_width


def detectron2_key(key: str) -> str:
    """Translate a key of torchvision: stages start at res2, and a norm belongs to its convolution.

    >>> detectron2_key("layer1.0.bn2.weight"), detectron2_key("bn1.bias"), detectron2_key("layer4.0.downsample.1.bias")
    ('res2.0.conv2.norm.weight', 'stem.conv1.norm.bias', 'res5.0.shortcut.norm.bias')
    """
    key = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", key)
    key = re.sub(r"\bbn(\d)\b", r"conv\1.norm", key if key.startswith("res") else f"stem.{key}")
    return key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


def torchvision_key(key: str) -> str:
    """Translate a key of detectron2 back."""
    key = re.sub(r"^res(\d)", lambda match: f"layer{int(match[1]) - 1}", key.removeprefix("stem."))
    key = key.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")
    return re.sub(r"conv(\d)\.norm", r"bn\1", key)


class _Pickler(pickle.Pickler):
    """Write an array as numpy.ndarray(shape, dtype, bytes), which every version reads.

    A pickle of numpy 2 does not open in numpy 1.25, which many installations of detectron2 have.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ndarray, (value.shape, value.dtype.str, bytearray(np.ascontiguousarray(value).tobytes()))
        return NotImplemented
