"""CAE: predict the features of masked patches from the visible ones, and what the patches show from these features.

Chen et al.: "Context Autoencoder for Self-Supervised Representation Learning", IJCV 2023. The loss is Eq. 1: the
prediction of the masked patches plus `alignment_weight` times the mean squared error between predicted features and
those that the encoder itself computes from the masked patches alone, without gradient. The paper predicts the tokens
of DALL-E's tokenizer; the default here is MAE's normalized pixels, since no external weights are needed. `tokenizer`
predicts the tokens of a codebook by cross-entropy. Encoder and masks are those of lightly and `masks.py`.

x ── visible patches ── encoder ┐
                                ├ regressor ── features ── decoder ── linear ── MSE with pixels, or cross-entropy
   mask tokens, positions ──────┘                 └ MSE ┐
x ── masked patches ── encoder, no gradient ────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.methods.base import StepOutput
from snclr.methods.common.features import at_least_float32, autocast_disabled
from snclr.methods.config import CAEConfig
from snclr.methods.masked.base import MaskedMethod
from snclr.methods.masked.codebook import read_codebook
from snclr.methods.masked.masks import PatchMask, block_masks

LAYER_SCALE = 0.1
"""Initial scale of the branches of regressor and decoder, the authors' for ViT-B."""
_Norm = partial(nn.LayerNorm, eps=1e-6)


class RegressorBlock(nn.Module):
    """Cross-attention from the masked patches to all patches, then an MLP; the visible patches are not updated."""

    def __init__(self, width: int, heads: int) -> None:
        from timm.layers.layer_scale import LayerScale
        from timm.layers.mlp import Mlp

        super().__init__()
        self.norm_query, self.norm_key, self.norm_value, self.norm = (_Norm(width) for _ in range(4))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = Mlp(width, 4 * width)
        self.scale_attention, self.scale_mlp = (LayerScale(width, LAYER_SCALE) for _ in range(2))

    def forward(self, x: Tensor, visible: Tensor, positions: Tensor, visible_positions: Tensor) -> Tensor:
        """Update the masked patches (N, M, C) from themselves and the visible ones (N, V, C)."""
        context = torch.cat([visible, x], dim=1)
        query = self.norm_query(x + positions)
        key = self.norm_key(context + torch.cat([visible_positions, positions], dim=1))
        attended, _ = self.attention(query, key, self.norm_value(context), need_weights=False)
        x = self.norm(x + self.scale_attention(attended))
        return x + self.scale_mlp(self.mlp(x))


class CAE(MaskedMethod):
    """Encoder on the visible patches, regressor and decoder on the masked ones."""

    config: CAEConfig
    positions: Tensor

    def __init__(self, encoder: nn.Module, num_features: int, config: CAEConfig, *, seed: int) -> None:
        from lightly.models.modules.masked_vision_transformer_timm import init_weights
        from lightly.models.utils import get_2d_sine_cosine_positional_embedding
        from timm.models.vision_transformer import Block

        super().__init__(encoder, num_features, config, seed=seed)
        width, heads = self.encoder.embed_dim, self.encoder.blocks[0].attn.num_heads
        pixels = 3 * self.patch_size**2
        self.tokenizer = None if config.tokenizer is None else read_codebook(config.tokenizer, pixels)
        positions = get_2d_sine_cosine_positional_embedding(width, self.grid, num_prefix_tokens=0)
        self.register_buffer("positions", torch.from_numpy(positions).float(), persistent=False)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=0.02))
        self.regressor = nn.ModuleList(RegressorBlock(width, heads) for _ in range(config.regressor_layers))
        self.regressor_norm = _Norm(width)
        norm: Any = _Norm  # timm's hint names a class
        blocks = [
            Block(width, heads, qkv_bias=True, init_values=LAYER_SCALE, norm_layer=norm)
            for _ in range(config.decoder_layers)
        ]
        outputs = pixels if self.tokenizer is None else len(self.tokenizer.codebook)
        self.decoder = nn.Sequential(*blocks, _Norm(width), nn.Linear(width, outputs))
        for part in (self.regressor, self.decoder):
            part.apply(init_weights)
            part.apply(_init_attention)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of the first view: prediction of the masked patches, and alignment of their features."""
        images = views[0]
        mask = block_masks(self.seed, epoch, ids, self.grid, self.visible)
        with torch.no_grad():
            target = self.last_norm(self.encode_patches(images, mask.masked)[:, self.prefix_tokens :])
        tokens = self.encode_patches(images, mask.visible)
        predicted, features = self.predict_masked(self.last_norm(tokens[:, self.prefix_tokens :]), mask)
        with autocast_disabled(predicted):
            prediction = self.prediction_loss(at_least_float32(predicted), self.pixels(images, mask.masked))
            alignment = F.mse_loss(at_least_float32(features), at_least_float32(target))
            loss = prediction + self.config.alignment_weight * alignment
        return StepOutput(loss=loss, features=self.pooled(tokens))

    def predict_masked(self, visible: Tensor, mask: PatchMask) -> tuple[Tensor, Tensor]:
        """Return the outputs of the decoder (N, M, …) and the predicted features (N, M, C) of the masked patches."""
        positions, visible_positions = self.positions[mask.masked], self.positions[mask.visible]
        x = self.mask_token.expand(*mask.masked.shape, -1)
        for block in self.regressor:
            x = block(x, visible, positions, visible_positions)
        features = self.regressor_norm(x)
        return self.decoder(features + positions), features

    def prediction_loss(self, predicted: Tensor, pixels: Tensor) -> Tensor:
        """Return the squared error of the pixels, or the cross-entropy of the tokens with a tokenizer."""
        from lightly.models.utils import normalize_mean_var

        if self.tokenizer is not None:
            return F.cross_entropy(predicted.flatten(0, 1), self.tokenizer(pixels).flatten())
        return F.mse_loss(predicted, normalize_mean_var(pixels) if self.config.normalize_pixels else pixels)


@torch.no_grad()
def _init_attention(module: nn.Module) -> None:
    """Initialize query, key and value of a cross-attention as three matrices."""
    if isinstance(module, nn.MultiheadAttention):
        for part in module.in_proj_weight.chunk(3):
            nn.init.xavier_uniform_(part)
