"""The layers of a ResNet from its architecture rule alone, and their names in torchvision, mmdet and detectron2.

The detection libraries are not needed for an export: what their ResNets are made of is written down here, and a file is
compared with it key by key and shape by shape. torchvision's classes play no part in these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from snclr.encoders import EncoderSpec
from snclr.errors import UserError

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True)
class Layout:
    """What tells one ResNet from another: layers, groups of the 3×3 convolutions, and their channels a group."""

    depth: int
    groups: int = 1
    width: int = 64


LAYOUTS: dict[str, Layout] = {
    "resnet18": Layout(18),
    "resnet34": Layout(34),
    "resnet50": Layout(50),
    "resnet101": Layout(101),
    "resnet152": Layout(152),
    "resnext50_32x4d": Layout(50, 32, 4),
    "resnext101_32x8d": Layout(101, 32, 8),
    "resnext101_64x4d": Layout(101, 64, 4),
    "wide_resnet50_2": Layout(50, 1, 128),
    "wide_resnet101_2": Layout(101, 1, 128),
}


@dataclass(frozen=True)
class Convolution:
    """One convolution, which is always followed by a batch norm. Stage 0 is the stem, 1 to 4 hold the blocks."""

    stage: int
    block: int
    place: str
    """ "conv1", "conv2", "conv3" or "shortcut"."""
    shape: tuple[int, int, int, int]


Names = Callable[[Convolution], tuple[str, str]]
"""A library's names of a convolution and of the batch norm after it."""


def convolutions(layout: Layout) -> Iterator[Convolution]:
    """Yield every convolution in order.

    >>> [c.shape for c in convolutions(Layout(50))][:3]
    [(64, 3, 7, 7), (64, 64, 1, 1), (64, 64, 3, 3)]
    """
    yield Convolution(0, 0, "conv1", (64, 3, 7, 7))
    bottleneck = layout.depth >= 50
    channels = 64
    for stage, blocks in enumerate(_BLOCKS[layout.depth], start=1):
        planes = 64 * 2 ** (stage - 1)
        inner = planes * layout.width // 64 * layout.groups
        out = planes * 4 if bottleneck else planes
        for block in range(blocks):
            shapes = (
                [(inner, channels, 1, 1), (inner, inner // layout.groups, 3, 3), (out, inner, 1, 1)]
                if bottleneck
                else [(out, channels, 3, 3), (out, out, 3, 3)]
            )
            for number, shape in enumerate(shapes, start=1):
                yield Convolution(stage, block, f"conv{number}", shape)
            if channels != out:
                yield Convolution(stage, block, "shortcut", (out, channels, 1, 1))
            channels = out


def torchvision_names(c: Convolution) -> tuple[str, str]:
    """Return torchvision's names, which are mmdet's too."""
    if c.stage == 0:
        return "conv1", "bn1"
    block = f"layer{c.stage}.{c.block}"
    if c.place == "shortcut":
        return f"{block}.downsample.0", f"{block}.downsample.1"
    return f"{block}.{c.place}", f"{block}.bn{c.place[-1]}"


def detectron2_names(c: Convolution) -> tuple[str, str]:
    """Return detectron2's names: stages count from res2, a norm belongs to its convolution."""
    name = "stem.conv1" if c.stage == 0 else f"res{c.stage + 1}.{c.block}.{c.place}"
    return name, f"{name}.norm"


def keys(c: Convolution, names: Names) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a convolution and its batch norm: key to shape."""
    conv, norm = names(c)
    statistics = {f"{norm}.{part}": (c.shape[0],) for part in ("weight", "bias", "running_mean", "running_var")}
    return {f"{conv}.weight": c.shape, **statistics, f"{norm}.num_batches_tracked": ()}


def table(layout: Layout, names: Names) -> dict[str, tuple[int, ...]]:
    """Return all tensors of a ResNet without a classifier under a library's names: key to shape."""
    return {key: shape for c in convolutions(layout) for key, shape in keys(c, names).items()}


def check_table(state: Mapping[str, Tensor], layout: Layout, names: Names) -> None:
    """Raise a UserError unless keys and shapes are exactly those of the architecture."""
    expected = table(layout, names)
    given = {key: tuple(value.shape) for key, value in state.items()}
    wrong = sorted(key for key in expected.keys() | given.keys() if expected.get(key) != given.get(key))
    if wrong:
        shown = ", ".join(f"{key} ({given.get(key, 'missing')})" for key in wrong[:3])
        raise UserError(f"{len(wrong)} tensors are not those of a ResNet-{layout.depth}: {shown}")


def not_a_torchvision_resnet(spec: EncoderSpec) -> str | None:
    """Say why an encoder is not one of torchvision's ResNets as they are; None if it is."""
    if spec.library != "torchvision":
        return f"{spec.name} is not one of torchvision's ResNets ({', '.join(LAYOUTS)})"
    if spec.stem != "standard":
        return f"{spec.name} was trained with the low-resolution stem {spec.stem!r} in place of the 7×7 one"
    return None
