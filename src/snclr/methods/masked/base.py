"""Base of the methods that mask patches: a ViT that encodes some patches of an image, and their pixels as targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.base import Method
from snclr.methods.common.features import at_least_float32, l2_normalize
from snclr.methods.config import MaskedConfig
from snclr.methods.masked.masks import visible_count


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

    def build_projector(self, num_features: int) -> nn.Module:
        """Return the identity: the features of the encoder are used directly."""
        return nn.Identity()

    def token_index(self, patches: Tensor) -> Tensor:
        """Return the places (N, P + n) of the P prefix tokens and of the given patches (N, n) among all tokens."""
        prefix = torch.arange(self.prefix_tokens, device=patches.device).expand(len(patches), -1)
        return torch.cat([prefix, patches + self.prefix_tokens], dim=1)

    def encode_patches(self, images: Tensor, patches: Tensor) -> Tensor:
        """Encode some patches (N, n) of the images, without the others: tokens (N, P + n, C) before pooling."""
        tokens: Tensor = self._masked_vit[0].encode(images, idx_keep=self.token_index(patches))
        return tokens

    def last_norm(self, tokens: Tensor) -> Tensor:
        """Apply the last norm to encoded tokens, if the encoder has it after the pooling (timm's `fc_norm`).

        Other encoders apply it in `encode_patches`, and their `fc_norm` is the identity.
        """
        normed: Tensor = self.encoder.fc_norm(tokens)
        return normed

    @torch.no_grad()
    def pooled(self, tokens: Tensor) -> Tensor:
        """Return the normalized feature (N, C) of encoded tokens: [CLS] or their mean, as the encoder pools."""
        return l2_normalize(self.encoder.forward_head(tokens.detach()))

    @torch.no_grad()
    def pixels(self, images: Tensor, patches: Tensor) -> Tensor:
        """Return the pixels (N, n, p · p · 3) of some patches (N, n), in float32."""
        from lightly.models.utils import get_at_index, patchify

        return get_at_index(patchify(at_least_float32(images), self.patch_size), patches)
