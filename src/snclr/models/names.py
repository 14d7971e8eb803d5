"""Names of encoders beside those of timm, and the arguments of their models; without torch."""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snclr.errors import UserError, did_you_mean

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


def check_name(name: str) -> None:
    """Raise UserError for a name that is neither one of these nor in the source code of timm.

    Reading the files takes a tenth of a second, importing timm seconds. A name in them may still be none of a model:
    `models.encoders` looks it up later.
    """
    own = (*TORCHVISION_RESNETS, *SHORT_VITS, *NARROW_RESNETS, *NARROW_VITS)
    found = None if name in own else importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        return
    plain = name.partition(".")[0]
    code = "".join(path.read_text(encoding="utf-8") for path in Path(found.origin).parent.glob("models/*.py"))
    if name != plain or not re.search(rf"\b{re.escape(plain)}\b", code):
        raise unknown_encoder(name, [*own, *re.findall(r"@register_model\ndef (\w+)", code)])


def unknown_encoder(name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not known, with the closest one that is."""
    known, plain = list(known), name.partition(".")[0]
    if plain in known:
        return UserError(
            f"{name!r} names pretrained weights; an encoder is named without them, so use {plain!r}."
            " --init-from pretrained loads the library's default weights."
        )
    hint = did_you_mean(plain, known)
    return UserError(f"there is no encoder {name!r} in torchvision or timm{hint}. `snclr encoders` lists all.")
