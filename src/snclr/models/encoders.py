"""Encoders by name: torchvision's ResNets, any timm model, and narrow ResNets and a ViT for a CPU.

An encoder maps images (N, 3, S, S) to features (N, num_features): the pooled features of a convolutional network or the
[CLS] token of a ViT. It is the library's module without the classifier, so its weights have the library's keys. An
`EncoderSpec` describes it completely. Nothing here downloads weights; `pretrained.py` does, for
`--init-from pretrained`.

Weights are initialized by the library, except in a ViT with sine-cosine positions or a frozen patch embedding, which is
initialized as in MoCo v3 (Chen et al., 2021): Xavier-uniform, with query, key and value as separate matrices. A frozen
embedding keeps its initial values, so their scale matters.
"""

import contextlib
import dataclasses
import fnmatch
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.models.names import NARROW_RESNETS, NARROW_VITS, SHORT_VITS, TORCHVISION_RESNETS, unknown_encoder
from snclr.models.vit import fix_positions, init_patch_projection, is_vit, vit_args

STEMS = ("standard", "small", "half")
# Up to this image size the default stem is 3×3: the 7×7 stem with pooling reduces the resolution too much.
SMALL_IMAGE = 64


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Complete description of an encoder, made by `resolve_encoder`; its values fit into JSON."""

    name: str
    """Name given by the user."""
    library: str
    """"torchvision" or "timm"."""
    architecture: str
    """Name of the model in the library."""
    model_args: dict[str, Any]
    """Arguments of `timm.create_model` that change the architecture."""
    stem: str
    """"standard" (the library's own), or one 3×3 convolution without pooling: "small" (stride 1), "half" (stride 2)."""
    image_size: int
    num_features: int
    heads: int | None = None
    """Attention heads of a ViT. Weights also load with a wrong number, because the shapes do not depend on it."""
    sincos: bool = False
    """Fixed 2-D sine-cosine position embeddings."""
    frozen_patch_embed: bool = False
    """Whether the patch embedding keeps its initial weights."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> "EncoderSpec":
        """Return the spec from the untrusted result of `to_dict`, or raise a UserError.

        It must be what `resolve_encoder` returns for its name and options: other model arguments could make timm read
        files or access the network.
        """
        if not isinstance(data, dict) or not {"name", "image_size", "stem"} <= data.keys():
            raise UserError(f"not a saved encoder description: {reprlib.repr(data)}")
        heads = data.get("heads")
        fields = {"sincos": "sincos", "freeze_patch_embed": "frozen_patch_embed"}
        options = {option: data.get(field, False) for option, field in fields.items()}
        if type(heads) not in (int, type(None)) or any(type(option) is not bool for option in options.values()):
            raise UserError(f"invalid ViT options in the saved encoder description: {reprlib.repr(data)}")
        spec = resolve_encoder(data["name"], image_size=data["image_size"], stem=data["stem"], heads=heads, **options)
        if (resolved := spec.to_dict()) != resolved | data:
            wrong = sorted(str(key) for key in data if data[key] != resolved.get(key))
            raise UserError(f"the saved description of {spec.name} has wrong values of {', '.join(wrong[:3])}")
        return spec


def resolve_encoder(
    name: str,
    *,
    image_size: int,
    stem: str = "auto",
    heads: int | None = None,
    sincos: bool = False,
    freeze_patch_embed: bool = False,
) -> EncoderSpec:
    """Return the description of encoder `name` for square images of `image_size`, without allocating weights.

    `stem` applies to ResNets ("auto": "small" up to 64 pixels, else "standard"), the last three options to ViTs.

    >>> spec = resolve_encoder("resnet18", image_size=32)
    >>> spec.library, spec.stem, spec.num_features
    ('torchvision', 'small', 512)
    """
    if type(image_size) is not int or not 8 <= image_size <= 4096:
        raise UserError(f"image_size must be a whole number from 8 to 4096, not {image_size!r}")
    if stem not in ("auto", *STEMS):
        raise UserError(f"stem must be one of auto, {', '.join(STEMS)}, not {stem!r}")
    library, architecture, model_args = _look_up(name, image_size)
    with _dry_run(name, image_size):
        model = _create(library, architecture, model_args)
    if library == "timm" and is_vit(model):
        model_args |= vit_args(name, model, image_size, heads, sincos=sincos, freeze=freeze_patch_embed)
    elif heads is not None or sincos or freeze_patch_embed:
        raise UserError(
            f"heads, sincos and freeze_patch_embed need a plain timm ViT; {name} is not one. Remove these options or"
            " choose a ViT such as vit_small."
        )
    spec = EncoderSpec(
        name=name,
        library=library,
        architecture=architecture,
        model_args=model_args,
        stem=_resolve_stem(name, model, stem, image_size),
        image_size=image_size,
        num_features=0,
        heads=model_args.get("num_heads"),
        sincos=sincos,
        frozen_patch_embed=freeze_patch_embed,
    )
    return dataclasses.replace(spec, num_features=output_width(spec))


def build_encoder(spec: EncoderSpec, *, zero_init_residual: bool = False) -> nn.Module:
    """Return the encoder with new weights: images (N, 3, S, S) → features (N, num_features).

    A stem other than "standard" is one 3×3 convolution (stride 1 or 2) without pooling. `zero_init_residual` sets the
    last batch norm of every residual block of a torchvision ResNet to zero, so that each block starts as the identity.
    BYOL and MoCo v3 start so (Goyal et al., 2017). timm's ResNets always do.

    >>> encoder = build_encoder(resolve_encoder("resnet10-tiny", image_size=32))
    >>> encoder(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """
    start = {"zero_init_residual": zero_init_residual} if spec.library == "torchvision" else {}
    model: Any = _create(spec.library, spec.architecture, spec.model_args | start)
    if spec.stem != "standard":
        conv = nn.Conv2d(3, model.bn1.num_features, 3, stride=1 if spec.stem == "small" else 2, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision and timm
        model.conv1, model.maxpool = conv, nn.Identity()
    if spec.sincos or spec.frozen_patch_embed:
        init_patch_projection(model)
    if spec.sincos:
        fix_positions(model)
    if spec.frozen_patch_embed:
        model.patch_embed.proj.requires_grad_(False)
    return model


def list_encoders(filter: str | None = None) -> list[str]:
    """Return all encoder names, sorted; with `filter`, those that contain it or match it as a glob pattern.

    >>> list_encoders("resnet10-*")
    ['resnet10-narrow', 'resnet10-tiny']
    """
    import timm

    names = sorted({*TORCHVISION_RESNETS, *SHORT_VITS, *NARROW_VITS, *NARROW_RESNETS, *timm.list_models()})
    if filter is None:
        return names
    pattern = filter if any(sign in filter for sign in "*?[") else f"*{filter}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def state_on_meta(spec: EncoderSpec) -> dict[str, Tensor]:
    """Return the state dict of an encoder on the meta device: keys, shapes and dtypes without values."""
    with _dry_run(spec.name, spec.image_size):
        return build_encoder(spec).state_dict()


def output_width(spec: EncoderSpec) -> int:
    """Return the number of features, from a forward pass: `num_features` of timm is not always that of the output.

    The pass runs on the meta device, without memory or randomness. Raise UserError for an unsupported image size.
    """
    features: object = None
    for device in ("meta", "cpu"):
        try:
            with _dry_run(spec.name, spec.image_size, device):
                features = build_encoder(spec).eval()(torch.zeros(2, 3, spec.image_size, spec.image_size))
            break
        except UserError as error:
            if "meta" not in str(error):  # else the model reads values, which meta tensors do not have
                raise
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise UserError(f"{spec.name} does not return one feature vector per image; choose another encoder")
    return features.shape[1]


@contextlib.contextmanager
def _dry_run(name: str, image_size: int, device: str = "meta") -> Iterator[None]:
    """Build and run an encoder without gradients and without changing the random state, by default without memory.

    Errors become a UserError about the image size: the libraries raise many types for an unsupported one.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
            yield
    except Exception as error:
        raise UserError(
            f"{name} does not support {image_size}×{image_size} images ({error or type(error).__name__})."
            " Choose another image size or encoder."
        ) from error


def _look_up(name: str, image_size: int) -> tuple[str, str, dict[str, Any]]:
    """Return library, architecture and model arguments for a name and image size."""
    if not isinstance(name, str):
        raise UserError(f"encoder must be a name such as resnet50, not {name!r}")
    if name in TORCHVISION_RESNETS:
        return "torchvision", name, {}
    if name in NARROW_RESNETS:
        return "timm", "resnet18", dict(NARROW_RESNETS[name])
    if name in NARROW_VITS or name in SHORT_VITS:
        sizes = {"img_size": image_size, "patch_size": _patch_size(name, image_size)}
        return "timm", SHORT_VITS.get(name, SHORT_VITS["vit_tiny"]), {**sizes, **NARROW_VITS.get(name, {})}
    import timm

    # Exactly this name: `timm.create_model` would also accept URLs.
    if name not in timm.list_models():
        raise unknown_encoder(name, list_encoders())
    pretrained_cfg = timm.get_pretrained_cfg(name)
    takes_size = pretrained_cfg is not None and pretrained_cfg.fixed_input_size
    return "timm", name, {"img_size": image_size} if takes_size else {}


def _patch_size(name: str, image_size: int) -> int:
    """Return the largest patch size with at least 8 patches per side: 16 from 128 pixels, 4 at 32 pixels."""
    for patch, most in ((16, 256), (8, 32), (4, 32), (2, 32)):
        # Limit the patches per side: the cost of attention grows with its fourth power.
        if image_size % patch == 0 and 8 <= image_size // patch <= most:
            return patch
    nearest = max(16, round(image_size / 16) * 16)
    raise UserError(
        f"{name} cannot split {image_size}×{image_size} images into patches of 16 pixels (8, 4 or 2 for small images)."
        f" Choose another image size, such as {nearest}."
    )


def _create(library: str, architecture: str, model_args: dict[str, Any]) -> nn.Module:
    """Return the library's model with new weights and without the classifier."""
    if library == "torchvision":
        import torchvision

        model: nn.Module = torchvision.models.get_model(architecture, weights=None, **model_args)
        model.fc = nn.Identity()
        return model
    import timm

    return timm.create_model(architecture, pretrained=False, num_classes=0, **model_args)


def _resolve_stem(name: str, model: nn.Module, stem: str, image_size: int) -> str:
    """Return the resolved stem; raise UserError if the model does not have a replaceable one."""
    replaceable = all(hasattr(model, part) for part in ("conv1", "bn1", "maxpool", "layer1"))
    if stem == "auto":
        return "small" if replaceable and image_size <= SMALL_IMAGE else "standard"
    if stem != "standard" and not replaceable:
        raise UserError(f"stem {stem!r} is for ResNets; {name} has its own stem. Use stem auto.")
    return stem
