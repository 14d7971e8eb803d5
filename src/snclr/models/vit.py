"""ViT options: attention heads, sine-cosine position embeddings, frozen patch embedding, drop path, other image sizes.

The positions, the frozen patch embedding and their initialization follow MoCo v3 (Chen et al., 2021).
"""

from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError


def head_count(vit: Any) -> int | None:
    """Return the number of attention heads of a timm ViT; None if its blocks have no plain attention."""
    return getattr(getattr(vit.blocks[0], "attn", None), "num_heads", None)


def sincos_positions(width: int, grid: int) -> Tensor:
    """Return fixed position embeddings (grid · grid, width) of the patches, row by row.

    A quarter of the channels each: sine and cosine of the column, sine and cosine of the row, times the frequencies
    10000^(−4k / width), k = 0 … width/4 − 1.
    """
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([waves.repeat(grid, 1), waves.repeat_interleave(grid, dim=0)], dim=1).float()


def is_vit(model: nn.Module) -> bool:
    """Whether `model` is timm's plain vision transformer, which these options require."""
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(model, VisionTransformer)


def has_plain_patches(model: nn.Module) -> bool:
    """Whether `model` is a ViT whose patches can be left out: separate patches, [CLS] or mean pooling, nothing else."""
    from timm.layers.patch_embed import PatchEmbed

    if not is_vit(model) or not isinstance(model.patch_embed, PatchEmbed) or model.pos_embed is None:
        return False
    parts = {"patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre", "blocks", "norm", "fc_norm"}
    return {name.partition(".")[0] for name, _ in model.named_parameters()} <= parts


def vit_args(
    name: str, model: Any, image_size: int, heads: int | None, *, sincos: bool, freeze: bool
) -> dict[str, Any]:
    """Return the model arguments of a ViT; raise UserError if an option does not fit the model."""
    patch = model.patch_embed.patch_size[0]
    if image_size % patch:
        below, above = image_size // patch * patch, (image_size // patch + 1) * patch
        raise UserError(
            f"the image size of {name} must be a multiple of its patch size {patch}, not {image_size}."
            f" Use {above}" + (f" or {below}." if below else ".")
        )
    if heads is not None and (heads < 1 or model.embed_dim % heads):
        raise UserError(f"heads must divide the {model.embed_dim} channels of {name}; {heads} does not")
    if sincos or freeze:
        positions_fit = model.pos_embed is not None and model.embed_dim % 4 == 0
        if not isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d) or (sincos and not positions_fit):
            raise UserError(f"{name} has no plain patch or position embedding; choose vit_small or vit_base")
    count = heads or head_count(model)
    heads_args = {} if count is None else {"num_heads": count}
    pool_args = {"global_pool": "token"} if model.global_pool == "token" else {}
    return {**heads_args, **pool_args, **({"weight_init": "moco"} if sincos or freeze else {})}


@torch.no_grad()
def init_patch_projection(model: Any) -> None:
    """Initialize the patch embedding Xavier-uniform, as a linear layer on the pixels of a patch."""
    projection = model.patch_embed.proj
    nn.init.xavier_uniform_(projection.weight.flatten(1))  # a view, so the weight itself changes
    if projection.bias is not None:
        projection.bias.zero_()


@torch.no_grad()
def fix_positions(model: Any) -> None:
    """Set the position embeddings of a ViT to sine-cosine and freeze them; the [CLS] token has zeros."""
    rows, columns = model.patch_embed.grid_size
    assert rows == columns
    patches = sincos_positions(model.embed_dim, rows)
    model.pos_embed.zero_()
    model.pos_embed[0, model.pos_embed.shape[1] - len(patches) :] = patches
    model.pos_embed.requires_grad_(False)


def set_drop_path(encoder: Any, rate: float, name: str) -> None:
    """Skip the branches of block i of n with probability rate · i / (n − 1) in training; the weights stay the same."""
    from timm.layers.drop import DropPath

    blocks = list(encoder.blocks) if is_vit(encoder) else []
    if not blocks or not all(hasattr(block, "drop_path1") and hasattr(block, "drop_path2") for block in blocks):
        raise UserError(
            f"--drop-path needs a plain timm ViT; {name} is not one. Omit it or choose a ViT such as vit_small."
        )
    for block, probability in zip(blocks, torch.linspace(0, rate, len(blocks)).tolist(), strict=True):
        block.drop_path1, block.drop_path2 = DropPath(probability), DropPath(probability)


@torch.no_grad()
def accept_size(encoder: Any, size: int, name: str) -> None:
    """Let a ViT take images of any size, with interpolated positions; UserError if an encoder does not take `size`."""
    from timm.layers.format import Format

    if is_vit(encoder):
        # As with timm's dynamic_img_size=True, which would become part of the saved description of the encoder.
        encoder.dynamic_img_size = True
        patches = encoder.patch_embed
        patches.strict_img_size, patches.flatten, patches.output_fmt = False, False, Format.NHWC
    parameter = next(encoder.parameters())
    training = encoder.training
    try:
        encoder.eval()(parameter.new_zeros(1, 3, size, size))
    except Exception as error:  # the libraries raise many types
        raise UserError(
            f"{name} does not take local crops of {size}×{size} pixels ({error or type(error).__name__})."
            " Choose another --local-size or --encoder."
        ) from error
    finally:
        encoder.train(training)
