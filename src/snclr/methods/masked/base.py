"""Base of the methods that mask patches: a ViT that encodes some patches of an image, their pixels as targets, masks.

A mask is a pure function of (seed, epoch, image id), computed on the device of the ids. So it does not depend on ranks,
workers or a resume. lightly's masks draw from global generators.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.base import Method
from snclr.methods.common.features import at_least_float32, l2_normalize
from snclr.methods.common.hashing import MASK, hash_bits, uniform_from_bits
from snclr.methods.config import MaskedConfig

BLOCK_TRIES = 32
"""Blocks that are tried per image; the patches that are missing then are masked one by one."""
_MIN_BLOCK = 16 / 196  # smallest block as a share of the image, and its flattest shape, in BEiT and CAE
_MIN_ASPECT = 0.3


class MaskedMethod(Method):
    """A method with one view that encodes only some patches of a plain timm ViT (lightly's masked ViT).

    An image has `grid` × `grid` = `patches` patches, of which `visible` are visible, after `prefix_tokens` other tokens
    ([CLS], registers). Masks depend on `seed`, the epoch and the image id.
    """

    encoder: Any

    def __init__(self, encoder: nn.Module, num_features: int, config: MaskedConfig, *, seed: int) -> None:
        from lightly.models.modules.masked_vision_transformer_timm import MaskedVisionTransformerTIMM

        super().__init__(encoder, num_features, config)
        self.seed = seed
        self.grid, self.patch_size = self.encoder.patch_embed.grid_size[0], self.encoder.patch_embed.patch_size[0]
        self.patches, self.prefix_tokens = self.grid**2, self.encoder.num_prefix_tokens
        if self.patches < 2:
            raise UserError(
                "the image has one patch, and at least two are needed: one to see and one to predict."
                " Choose a larger --image-size or an encoder with smaller patches."
            )
        self.visible = visible_count(self.patches, config.mask_ratio)
        # In a tuple, so that the encoder is not registered twice and the unused mask token of lightly not at all.
        self._masked_vit = (
            MaskedVisionTransformerTIMM(self.encoder, weight_initialization="skip", pos_embed_initialization="skip"),
        )

    def token_index(self, patches: Tensor) -> Tensor:
        """Return the places (N, P + n) of the P prefix tokens and of the given patches (N, n) among all tokens."""
        prefix = torch.arange(self.prefix_tokens, device=patches.device).expand(len(patches), -1)
        return torch.cat([prefix, patches + self.prefix_tokens], dim=1)

    def encode_patches(self, images: Tensor, patches: Tensor) -> Tensor:
        """Encode some patches (N, n) of the images, without the others: tokens (N, P + n, C) before pooling."""
        return self._masked_vit[0].encode(images, idx_keep=self.token_index(patches))

    def last_norm(self, tokens: Tensor) -> Tensor:
        """Apply the last norm to encoded tokens, if the encoder has it after the pooling (timm's `fc_norm`).

        Other encoders apply it in `encode_patches`, and their `fc_norm` is the identity.
        """
        return self.encoder.fc_norm(tokens)

    @torch.no_grad()
    def pooled(self, tokens: Tensor) -> Tensor:
        """Return the normalized feature (N, C) of encoded tokens: [CLS] or their mean, as the encoder pools."""
        return l2_normalize(self.encoder.forward_head(tokens.detach()))

    @torch.no_grad()
    def pixels(self, images: Tensor, patches: Tensor, *, normalize: bool) -> Tensor:
        """Return the pixels (N, n, p · p · 3) of some patches (N, n), in float32, each patch normalized on request."""
        from lightly.models.utils import get_at_index, normalize_mean_var, patchify

        pixels = get_at_index(patchify(at_least_float32(images), self.patch_size), patches)
        return normalize_mean_var(pixels) if normalize else pixels


class PatchMask(NamedTuple):
    """Numbers of the visible (N, V) and of the masked patches (N, M) of each image, ascending."""

    visible: Tensor
    masked: Tensor


def visible_count(patches: int, mask_ratio: float) -> int:
    """Return how many patches stay visible: at least one, and at least one is masked.

    >>> visible_count(196, 0.75), visible_count(196, 0.5), visible_count(4, 0.99)
    (49, 98, 1)
    """
    return min(max(int(patches * (1 - mask_ratio) + 1e-9), 1), patches - 1)


def random_masks(seed: int, epoch: int, ids: Tensor, patches: int, visible: int) -> PatchMask:
    """Choose the visible patches of each image uniformly at random (MAE).

    >>> mask = random_masks(0, 0, torch.arange(2), patches=16, visible=4)
    >>> mask.visible.shape, mask.masked.shape
    (torch.Size([2, 4]), torch.Size([2, 12]))
    """
    order = hash_bits(seed, epoch, ids, MASK, patches).argsort(dim=1)
    return PatchMask(order[:, :visible].sort(dim=1).values, order[:, visible:].sort(dim=1).values)


def block_masks(seed: int, epoch: int, ids: Tensor, grid: int, visible: int) -> PatchMask:
    """Mask random rectangles of a grid × grid image until `visible` patches are left (BEiT's block-wise masking).

    A rectangle has at least 8 % of the patches, unless fewer are missing, and sides in a ratio of 0.3 to 1/0.3.
    """
    patches = grid * grid
    bits = hash_bits(seed, epoch, ids, MASK, 4 * BLOCK_TRIES + patches)
    numbers = uniform_from_bits(bits[:, : 4 * BLOCK_TRIES]).view(len(ids), BLOCK_TRIES, 4)
    place = torch.arange(grid, device=ids.device)
    mask = torch.zeros(len(ids), grid, grid, dtype=torch.bool, device=ids.device)
    missing = torch.full((len(ids),), patches - visible, device=ids.device)
    for number in range(BLOCK_TRIES):
        area, shape, vertical, horizontal = numbers[:, number].unbind(1)
        size = _MIN_BLOCK * patches + area * (missing - _MIN_BLOCK * patches)
        aspect = torch.exp((2 * shape - 1) * math.log(_MIN_ASPECT))
        height, width = (size * aspect).sqrt().round(), (size / aspect).sqrt().round()
        top, left = (vertical * (grid - height + 1)).floor(), (horizontal * (grid - width + 1)).floor()
        rows = (place >= top[:, None]) & (place < (top + height)[:, None])
        columns = (place >= left[:, None]) & (place < (left + width)[:, None])
        added = rows[:, :, None] & columns[:, None, :] & ~mask
        count = added.sum(dim=(1, 2))
        fits = (height < grid) & (width < grid) & (count <= missing)
        mask |= added & fits[:, None, None]
        missing = missing - count * fits
    # Masked patches first, then the others in random order: those that are missing are the first of these.
    order = bits[:, 4 * BLOCK_TRIES :].argsort(dim=1)
    order = order.gather(1, (~mask.flatten(1)).gather(1, order).byte().argsort(dim=1, stable=True))
    masked = patches - visible
    return PatchMask(order[:, masked:].sort(dim=1).values, order[:, :masked].sort(dim=1).values)
