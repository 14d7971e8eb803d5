"""CAE: predict the features of masked patches from the visible ones, and what the patches show from these features.

Chen et al.: "Context Autoencoder for Self-Supervised Representation Learning", IJCV 2023. The loss is Eq. 1: the
prediction of the masked patches plus `alignment_weight` times the mean squared error between predicted features and
those that the encoder itself computes from the masked patches alone, without gradient. The paper predicts the tokens
of DALL-E's tokenizer; the default here is MAE's normalized pixels, since no external weights are needed. `tokenizer`
predicts the tokens of a codebook by cross-entropy. The masked encoder is lightly's.

x ── visible patches ── encoder ┐
                                ├ regressor ── features ── decoder ── linear ── MSE with pixels, or cross-entropy
   mask tokens, positions ──────┘                 └ MSE ┐
x ── masked patches ── encoder, no gradient ────────────┘
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.base import StepOutput, Views
from snclr.methods.common.features import at_least_float32, autocast_disabled
from snclr.methods.config import CAEConfig
from snclr.methods.masked.base import MaskedMethod, PatchMask, block_masks

LAYER_SCALE = 0.1
"""Initial scale of the branches of regressor and decoder, the authors' for ViT-B."""
_Norm: Any = partial(nn.LayerNorm, eps=1e-6)  # Any: timm's hint names a class
_HELP = "The documentation page All methods, section CAE, describes the file."


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
        blocks = [
            Block(width, heads, qkv_bias=True, init_values=LAYER_SCALE, norm_layer=_Norm)
            for _ in range(config.decoder_layers)
        ]
        outputs = pixels if self.tokenizer is None else len(self.tokenizer.codebook)
        self.decoder = nn.Sequential(*blocks, _Norm(width), nn.Linear(width, outputs))
        for part in (self.regressor, self.decoder):
            part.apply(init_weights)
            part.apply(_init_attention)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of the first view: prediction of the masked patches, and alignment of their features."""
        images = views[0]
        mask = block_masks(self.seed, epoch, ids, self.grid, self.visible)
        with torch.no_grad():
            target = self.last_norm(self.encode_patches(images, mask.masked)[:, self.prefix_tokens :])
        tokens = self.encode_patches(images, mask.visible)
        predicted, features = self.predict_masked(self.last_norm(tokens[:, self.prefix_tokens :]), mask)
        with autocast_disabled(predicted):
            prediction = self.prediction_loss(at_least_float32(predicted), images, mask.masked)
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

    def prediction_loss(self, predicted: Tensor, images: Tensor, masked: Tensor) -> Tensor:
        """Return the squared error of the masked pixels, or the cross-entropy of their tokens with a tokenizer."""
        if self.tokenizer is None:
            return F.mse_loss(predicted, self.pixels(images, masked, normalize=self.config.normalize_pixels))
        tokens = self.tokenizer(self.pixels(images, masked, normalize=False))
        return F.cross_entropy(predicted.flatten(0, 1), tokens.flatten())


@torch.no_grad()
def _init_attention(module: nn.Module) -> None:
    """Initialize query, key and value of a cross-attention as three matrices."""
    if isinstance(module, nn.MultiheadAttention):
        for part in module.in_proj_weight.chunk(3):
            nn.init.xavier_uniform_(part)


class PatchCodebook(nn.Module):
    """A tokenizer of patches that is data and no code: the token of a patch is the number of the nearest code.

    It has codes (V, D) and an optional linear projection (p · p · 3, D) of the pixels; D is p · p · 3 without it. They
    are part of the checkpoint, so that a resumed run does not depend on the content of the file.
    """

    codebook: Tensor
    projection: Tensor | None

    def __init__(self, codebook: Tensor, projection: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("codebook", codebook)
        self.register_buffer("projection", projection)

    @torch.no_grad()
    def forward(self, patches: Tensor) -> Tensor:
        """Return the tokens (…) of patches (…, p · p · 3): the nearest code by Euclidean distance, the first of equals.

        >>> PatchCodebook(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))(torch.tensor([[0.2, 0.1], [0.9, 0.8]]))
        tensor([0, 1])
        """
        features = patches if self.projection is None else patches @ self.projection.to(patches.dtype)
        codes = self.codebook.to(features.dtype)
        return (codes.square().sum(dim=1) - 2 * features @ codes.T).argmin(dim=-1)


def read_codebook(path: str, width: int) -> PatchCodebook:
    """Read `codebook` and, if it is there, `projection` from a safetensors file for patches of `width` numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the tokenizer {path} cannot be read as safetensors ({error}). {_HELP}") from error
    codebook, projection = tensors.get("codebook"), tensors.get("projection")
    if codebook is None or not tensors.keys() <= {"codebook", "projection"}:
        raise UserError(
            f"the tokenizer {path} has the tensors {', '.join(sorted(tensors)) or 'none'}; it needs codebook and may"
            f" have projection. {_HELP}"
        )
    columns = width if projection is None else projection.shape[-1]
    fits = codebook.ndim == 2 and len(codebook) >= 2 and codebook.shape[1] == columns
    if not fits or (projection is not None and projection.shape != (width, columns)):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise UserError(
            f"the tokenizer {path} has {shapes}, which does not fit patches of {width} numbers: needed are projection"
            f" ({width}, D) and codebook (V, D), or codebook (V, {width}), with V of at least 2."
        )
    found = [tensor for tensor in (codebook, projection) if tensor is not None]
    if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in found):
        raise UserError(f"the tokenizer {path} has values that are not finite numbers. {_HELP}")
    return PatchCodebook(codebook.float(), None if projection is None else projection.float())
