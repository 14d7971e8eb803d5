"""Names of encoders that are not those of timm, and the arguments of their models; without torch."""

from __future__ import annotations

from typing import Any

from snclr.errors import UserError, known_spelling

TORCHVISION_RESNETS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)

SHORT_VITS = {f"vit_{size}": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}

# Arguments of timm's resnet18. Only its deep stem can be as narrow as the first stage.
NARROW_RESNETS: dict[str, dict[str, Any]] = {
    "resnet10-narrow": {"layers": [1, 1, 1, 1], "channels": [32, 64, 128, 256], "stem_type": "deep", "stem_width": 16},
    "resnet10-tiny": {"layers": [1, 1, 1, 1], "channels": [16, 32, 64, 128], "stem_type": "deep", "stem_width": 8},
}

# Arguments of timm's vit_tiny; the patch size is that of the short names.
NARROW_VITS: dict[str, dict[str, Any]] = {"vit4-tiny": {"embed_dim": 64, "depth": 4, "num_heads": 2}}


def check_spelling(name: str) -> None:
    """Raise UserError for a name such as resnet-50, which is one of these except for hyphens and case.

    Names of timm are those of functions. A name that could be one of them is looked up later.
    """
    known = (*TORCHVISION_RESNETS, *SHORT_VITS, *NARROW_RESNETS, *NARROW_VITS)
    meant = known_spelling(name, known)
    if name not in known and meant != name and not name.isidentifier():
        raise UserError(
            f"there is no encoder {name!r} in torchvision or timm (did you mean {meant!r}?)."
            " `snclr encoders` lists all."
        )
