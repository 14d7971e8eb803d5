"""Encoders by name: torchvision's ResNets, any timm model, and narrow ResNets for training on a CPU.

An encoder maps images (N, 3, S, S) to features (N, num_features): the pooled features of a convolutional network, the
[CLS] token of a ViT. It is the library's own module without its classifier, so its weights carry the library's own
keys, and the `EncoderSpec` says everything that is needed to build it again. Weights are never downloaded.

Initial weights are the library's own, with one exception. A ViT with fixed sin-cos positions or a frozen patch
projection starts as in MoCo v3 (Chen et al., 2021): Xavier-uniform everywhere, query, key and value each as a matrix of
its own. A frozen projection keeps its random values for good, so their scale must be right from the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.vits import fix_positions, init_patch_projection, is_vit, vit_args

STEMS = ("standard", "small", "half")
IMAGE_SIZES = range(8, 4097)
# Up to this size the 7×7 stem and its pooling would throw away most of the image before the first block.
SMALL_IMAGE = 64

TORCHVISION_RESNETS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)

SHORT_VITS = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
}

# Arguments to timm's resnet18. The deep stem is the one form in which timm lets the stem be as narrow as the stages.
NARROW_RESNETS: dict[str, dict[str, Any]] = {
    "resnet10-narrow": {"layers": [1, 1, 1, 1], "channels": [32, 64, 128, 256], "stem_type": "deep", "stem_width": 16},
    "resnet10-tiny": {"layers": [1, 1, 1, 1], "channels": [16, 32, 64, 128], "stem_type": "deep", "stem_width": 8},
}


def _is_count(value: object, most: int = 4096) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_count_of_stages(value: object, most: int) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(_is_count(item, most) for item in value)


# The only arguments a saved spec may hand to timm: a run folder can come from anyone, and others would make timm read
# files or the network.
_MODEL_ARGS: dict[str, Callable[[object], bool]] = {
    "img_size": _is_count,
    "patch_size": _is_count,
    "num_heads": _is_count,
    "stem_width": _is_count,
    "layers": lambda value: _is_count_of_stages(value, 64),
    "channels": lambda value: _is_count_of_stages(value, 4096),
    "global_pool": lambda value: value == "token",
    "weight_init": lambda value: value == "moco",
    "stem_type": lambda value: value == "deep",
}


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Everything needed to build an encoder; JSON-ready. Made by `resolve_encoder`."""

    name: str
    """As the user gave it."""
    library: str
    """"torchvision" or "timm"."""
    architecture: str
    """The library's own name for what is built."""
    model_args: dict[str, Any]
    """Arguments that change the architecture, as timm takes them."""
    stem: str
    """"standard" (the library's own), or one 3×3 convolution without pooling: "small" (stride 1), "half" (stride 2)."""
    image_size: int
    num_features: int
    heads: int | None = None
    """Attention heads of a ViT: another number loads into the same tensor shapes without a word."""
    sincos: bool = False
    """Fixed 2-D sin-cos positions."""
    frozen_patch_embed: bool = False
    """The patch projection keeps its random initial weights."""

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON-ready values; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> EncoderSpec:
        """Return the spec saved as ``data``, or raise a UserError: nothing in it is trusted."""
        fields = dataclasses.fields(cls)
        defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
        if isinstance(data, dict):
            data = {**defaults, **data}
        if not isinstance(data, dict) or set(data) != {field.name for field in fields}:
            raise UserError(f"This is not a saved encoder description: {reprlib.repr(data)}.")
        checks = {
            "name": isinstance(data["name"], str),
            "library": data["library"] in ("torchvision", "timm"),
            "architecture": _is_known(data["library"], data["architecture"]),
            "model_args": isinstance(data["model_args"], dict)
            and all(key in _MODEL_ARGS and _MODEL_ARGS[key](value) for key, value in data["model_args"].items()),
            "stem": data["stem"] in STEMS,
            "image_size": _is_count(data["image_size"]) and data["image_size"] in IMAGE_SIZES,
            "num_features": _is_count(data["num_features"], 2**20),
            "heads": data["heads"] is None or _is_count(data["heads"]),
            "sincos": isinstance(data["sincos"], bool),
            "frozen_patch_embed": isinstance(data["frozen_patch_embed"], bool),
        }
        for name, valid in checks.items():
            if not valid:
                value = reprlib.repr(data[name])
                raise UserError(f"The saved encoder description has {name} = {value}, which is not possible.")
        return cls(**data)


def resolve_encoder(
    name: str,
    *,
    image_size: int,
    stem: str = "auto",
    heads: int | None = None,
    sincos: bool = False,
    freeze_patch_embed: bool = False,
) -> EncoderSpec:
    """Return the full description of encoder ``name`` for square images of ``image_size``; allocates no weights.

    ``stem`` is for ResNets ("auto": "small" up to 64 pixels, else "standard"); the last three are for ViTs.

    >>> spec = resolve_encoder("resnet18", image_size=32)
    >>> spec.library, spec.stem, spec.num_features
    ('torchvision', 'small', 512)
    """
    if not _is_count(image_size) or image_size not in IMAGE_SIZES:
        raise UserError(
            f"The image size is {image_size!r}; it must be a whole number from {IMAGE_SIZES[0]} to {IMAGE_SIZES[-1]}."
        )
    if stem not in ("auto", *STEMS):
        raise UserError(f"Unknown stem {stem!r}; choose one of auto, {', '.join(STEMS)}.")
    library, architecture, model_args = _look_up(name, image_size)
    try:
        with _scratch("meta"):
            model = _create(library, architecture, model_args)
    except Exception as error:  # whatever the library raises for a size it cannot be built for
        raise _refused(name, image_size, error) from error
    if library == "timm" and is_vit(model):
        model_args |= vit_args(name, model, image_size, heads, sincos=sincos, freeze=freeze_patch_embed)
    elif heads is not None or sincos or freeze_patch_embed:
        raise UserError(
            f"A head count, sin-cos positions and a frozen patch embedding are for timm's plain ViTs; {name} is none. "
            "Leave these options out or choose a ViT, such as vit_small."
        )
    spec = EncoderSpec(
        name=name,
        library=library,
        architecture=architecture,
        model_args=model_args,
        stem=_pick_stem(name, model, stem, image_size),
        image_size=image_size,
        num_features=1,  # known after the first forward pass, next line
        heads=model_args.get("num_heads"),
        sincos=sincos,
        frozen_patch_embed=freeze_patch_embed,
    )
    return dataclasses.replace(spec, num_features=output_width(spec))


def build_encoder(spec: EncoderSpec) -> nn.Module:
    """Return the encoder, newly initialised: images (N, 3, S, S) to features (N, num_features).

    >>> encoder = build_encoder(resolve_encoder("resnet10-tiny", image_size=32))
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """
    model = _create(spec.library, spec.architecture, spec.model_args)
    if spec.stem != "standard":
        _swap_stem(model, spec.stem)
    if spec.sincos or spec.frozen_patch_embed:
        init_patch_projection(model)
    if spec.sincos:
        fix_positions(model)
    if spec.frozen_patch_embed:
        model.get_submodule("patch_embed.proj").requires_grad_(False)
    return model


def list_encoders(filter: str | None = None) -> list[str]:
    """Return the names there are, sorted; with ``filter``, those that contain it or match it as a pattern.

    >>> list_encoders("resnet10-*")
    ['resnet10-narrow', 'resnet10-tiny']
    """
    import timm

    names = sorted({*TORCHVISION_RESNETS, *SHORT_VITS, *NARROW_RESNETS, *timm.list_models()})
    if filter is None:
        return names
    pattern = filter if any(sign in filter for sign in "*?[") else f"*{filter}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def state_on_meta(spec: EncoderSpec) -> dict[str, Tensor]:
    """Return the state dict an encoder of ``spec`` has, without its values: keys, shapes and dtypes, no memory."""
    try:
        with _scratch("meta"):
            return build_encoder(spec).state_dict()
    except Exception as error:  # a saved description whose parts do not fit together
        raise _refused(spec.name, spec.image_size, error) from error


def output_width(spec: EncoderSpec) -> int:
    """Return the number of features, found by a forward pass: the libraries' own attributes name other layers at times.

    The pass runs on the meta device, which takes no memory and consumes no randomness; a UserError says why if the
    encoder cannot take images of that size.
    """
    for device in ("meta", "cpu"):
        try:
            with _scratch(device):
                features = build_encoder(spec).eval()(torch.zeros(2, 3, spec.image_size, spec.image_size))
            break
        except Exception as error:  # whatever the library raises for a size it cannot take
            # A few models look at values, which meta tensors do not have; they are run for real.
            if device == "cpu" or "meta" not in str(error):
                raise _refused(spec.name, spec.image_size, error) from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise UserError(f"{spec.name} does not give one feature vector an image; choose another encoder.")
    return features.shape[1]


@contextlib.contextmanager
def _scratch(device: str) -> Iterator[None]:
    """Build and run on ``device`` without gradients, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
        yield


def _look_up(name: str, image_size: int) -> tuple[str, str, dict[str, Any]]:
    """Return the library, its own name for the architecture, and the arguments that depend on name and size."""
    if not isinstance(name, str):
        raise UserError(f"An encoder is chosen by its name, such as resnet50; {name!r} was given.")
    if name in TORCHVISION_RESNETS:
        return "torchvision", name, {}
    if name in NARROW_RESNETS:
        return "timm", "resnet18", dict(NARROW_RESNETS[name])
    if name in SHORT_VITS:
        return "timm", SHORT_VITS[name], {"img_size": image_size, "patch_size": _patch_size(name, image_size)}
    import timm

    if not _is_known("timm", name):
        raise UserError(_unknown_name(name))
    pretrained_cfg = timm.get_pretrained_cfg(name)
    takes_size = pretrained_cfg is not None and pretrained_cfg.fixed_input_size
    return "timm", name, {"img_size": image_size} if takes_size else {}


def _is_known(library: object, architecture: object) -> bool:
    """Tell whether a library has an architecture of exactly this name (timm takes addresses as names too)."""
    if library == "torchvision":
        return architecture in TORCHVISION_RESNETS
    import timm

    return architecture in timm.list_models()


def _refused(name: str, image_size: int, error: Exception) -> UserError:
    """Return the error for an image size the encoder cannot take, with the library's reason."""
    reason = str(error) or type(error).__name__
    return UserError(
        f"{name} cannot take {image_size}×{image_size} images ({reason}). Choose another image size or another encoder."
    )


def _unknown_name(name: str) -> str:
    """Return the message for a name neither library has, with the nearest names there are."""
    plain = str(name).partition(".")[0]
    names = list_encoders()
    if plain in names and plain != name:
        return f"{name!r} names pretrained weights, and encoders start untrained here; use {plain!r}."
    near = difflib.get_close_matches(plain, names, n=5, cutoff=0.6)
    hint = f"Did you mean {', '.join(near)}?" if near else "Try resnet50 or vit_small."
    return f"There is no encoder {name!r} in torchvision or timm. {hint} All names: snclr encoders"


def _patch_size(name: str, image_size: int) -> int:
    """Return the largest usual patch that tiles the image with 8 or more a side: 16 from 128 pixels on, 4 at 32."""
    for patch, most in ((16, 256), (8, 32), (4, 32), (2, 32)):
        # Smaller patches only for smaller images: the cost of attention grows with the fourth power of this number.
        if image_size % patch == 0 and 8 <= image_size // patch <= most:
            return patch
    nearest = max(16, round(image_size / 16) * 16)
    raise UserError(
        f"{name} cannot tile {image_size}×{image_size} images with square patches of 16 pixels (or 8, 4, 2 if small). "
        f"Choose another image size, such as {nearest}."
    )


def _create(library: str, architecture: str, model_args: dict[str, Any]) -> nn.Module:
    """Return the library's model with its own initial weights and no classifier."""
    if library == "torchvision":
        import torchvision

        model: nn.Module = torchvision.models.get_model(architecture, weights=None)
        model.fc = nn.Identity()
        return model
    import timm

    return timm.create_model(architecture, pretrained=False, num_classes=0, **model_args)


def _pick_stem(name: str, model: nn.Module, stem: str, image_size: int) -> str:
    """Return the stem that is meant, or raise a UserError where the model has none of that kind."""
    swappable = all(hasattr(model, part) for part in ("conv1", "bn1", "maxpool", "layer1"))
    if stem == "auto":
        return "small" if swappable and image_size <= SMALL_IMAGE else "standard"
    if stem != "standard" and not swappable:
        raise UserError(f"The stem {stem!r} is for ResNets; {name} has a stem of its own. Leave it at auto.")
    return stem


def _swap_stem(model: nn.Module, stem: str) -> None:
    """Put one 3×3 convolution (stride 1 or 2) in place of a ResNet's stem and drop the pooling after it."""
    width = model.get_submodule("bn1").num_features
    assert isinstance(width, int)
    conv = nn.Conv2d(3, width, 3, stride=1 if stem == "small" else 2, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as both libraries do
    model.conv1, model.maxpool = conv, nn.Identity()
