"""What a plain ViT can be told beyond its name: head count, fixed sin-cos positions, a frozen patch projection.

The last two, and the initial weights that go with them, are those of MoCo v3 (Chen et al., 2021).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError


def head_count(encoder: nn.Module) -> int | None:
    """Return the number of attention heads of a ViT, None where there is no such number."""
    blocks = getattr(encoder, "blocks", None)
    attention = getattr(blocks[0], "attn", None) if isinstance(blocks, nn.Sequential) and len(blocks) else None
    heads = getattr(attention, "num_heads", None)
    return heads if isinstance(heads, int) else None


def sincos_positions(width: int, grid: int) -> Tensor:
    """Return fixed positions (grid · grid, width) of the patches, row by row.

    A quarter of the channels each: sin and cos of the column, sin and cos of the row, times the frequencies
    10000^(−4k / width), k = 0 … width/4 − 1. Positions near each other have a large inner product.
    """
    assert width % 4 == 0, "sin and cos of two coordinates need a multiple of four channels"
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns = waves[None].expand(grid, grid, -1)
    rows = waves[:, None].expand(grid, grid, -1)
    return torch.cat([columns, rows], dim=2).reshape(grid * grid, width).float()


def is_vit(model: nn.Module) -> bool:
    """Tell whether ``model`` is timm's plain vision transformer, the one these options are for."""
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(model, VisionTransformer)


def vit_args(
    name: str, model: Any, image_size: int, heads: int | None, *, sincos: bool, freeze: bool
) -> dict[str, Any]:
    """Return what a spec of a ViT states beyond its name, after checking that the options fit the model."""
    patch = model.patch_embed.patch_size[0]
    if image_size % patch:
        below, above = image_size // patch * patch, (image_size // patch + 1) * patch
        raise UserError(
            f"{name} cuts images into {patch}×{patch} patches, and {image_size} is not a multiple of {patch}. "
            f"Use an image size of {above}" + (f" or {below}." if below else ".")
        )
    if heads is not None and (heads < 1 or model.embed_dim % heads):
        raise UserError(f"{heads} heads cannot share the {model.embed_dim} channels of {name} equally; use a divisor.")
    if sincos or freeze:
        positions_fit = model.pos_embed is not None and model.embed_dim % 4 == 0
        if not isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d) or (sincos and not positions_fit):
            raise UserError(f"{name} has no plain patch projection or positions to fix; choose vit_small or vit_base.")
    count = heads or head_count(model)
    args: dict[str, Any] = {} if count is None else {"num_heads": count}
    if model.global_pool == "token":
        args["global_pool"] = "token"
    if sincos or freeze:
        args["weight_init"] = "moco"
    return args


@torch.no_grad()
def init_patch_projection(model: nn.Module) -> None:
    """Start the patch projection Xavier-uniform, as the linear map from a patch's pixels that it is."""
    projection = model.get_submodule("patch_embed.proj")
    assert isinstance(projection, nn.Conv2d)
    fan_in = projection.in_channels * math.prod(projection.kernel_size)
    bound = math.sqrt(6.0 / (fan_in + projection.out_channels))
    projection.weight.uniform_(-bound, bound)
    if projection.bias is not None:
        projection.bias.zero_()


@torch.no_grad()
def fix_positions(model: Any) -> None:
    """Write sin-cos positions into a ViT and freeze them; tokens that are no patch (the [CLS] token) have zeros."""
    rows, columns = model.patch_embed.grid_size
    assert rows == columns
    patches = sincos_positions(model.embed_dim, rows)
    model.pos_embed.zero_()
    model.pos_embed[0, model.pos_embed.shape[1] - len(patches) :] = patches
    model.pos_embed.requires_grad_(False)
