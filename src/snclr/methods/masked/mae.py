"""MAE: reconstruct the pixels of masked patches from the visible ones.

He, Chen, Xie, Li, Dollár, Girshick: "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022, Section 3. The
encoder sees the visible quarter of the patches only. The decoder, a small ViT, gets its outputs and a learned mask
token for every other patch, all with positions. The loss is the mean squared error over the masked patches, whose
pixels are normalized by the mean and deviation of their patch. Masked ViT and decoder are lightly's.

x ── visible patches ── encoder ── linear ┐
                                          ├ decoder ── linear ── MSE with the pixels of the masked patches
                  mask tokens, positions ─┘
"""

from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.base import StepOutput, Views
from snclr.methods.common.features import at_least_float32, autocast_disabled
from snclr.methods.config import MAEConfig
from snclr.methods.masked.base import MaskedMethod, PatchMask, random_masks


class MAE(MaskedMethod):
    """Encoder on the visible patches, decoder on all, loss on the masked ones."""

    config: MAEConfig

    def __init__(self, encoder: nn.Module, num_features: int, config: MAEConfig, *, seed: int) -> None:
        from lightly.models.modules.masked_vision_transformer_decoder_timm import MaskedVisionTransformerDecoderTIMM
        from lightly.models.modules.masked_vision_transformer_timm import init_weights

        super().__init__(encoder, num_features, config, seed=seed)
        width = config.decoder_dim
        if width % 4 or width % config.decoder_heads:
            raise UserError(
                f"decoder_dim={width} must be a multiple of 4 and of decoder_heads={config.decoder_heads}."
                " Change one of them."
            )
        self.decoder_embed = nn.Linear(self.encoder.embed_dim, width)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            num_patches=self.patches, embed_dim=width, depth=config.decoder_layers, num_heads=config.decoder_heads,
            num_prefix_tokens=self.prefix_tokens,
        )  # fmt: skip
        self.decoder_head = nn.Linear(width, 3 * self.patch_size**2)
        self.decoder_embed.apply(init_weights)
        self.decoder_head.apply(init_weights)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the mean squared error of the masked patches of the first view."""
        images = views[0]
        mask = random_masks(self.seed, epoch, ids, self.patches, self.visible)
        tokens = self.encode_patches(images, mask.visible)
        predicted = self.decode(self.last_norm(tokens), mask)
        with autocast_disabled(predicted):
            target = self.pixels(images, mask.masked, normalize=self.config.normalize_pixels)
            loss = (at_least_float32(predicted) - target).square().mean()
        return StepOutput(loss=loss, features=self.pooled(tokens))

    def decode(self, tokens: Tensor, mask: PatchMask) -> Tensor:
        """Predict the pixels (N, M, p · p · 3) of the masked patches from the encoded visible ones."""
        from lightly.models.utils import get_at_index, repeat_token, set_at_index

        embedded = self.decoder_embed(tokens)
        everywhere = repeat_token(self.decoder.mask_token, (len(tokens), self.prefix_tokens + self.patches))
        filled = set_at_index(everywhere.type_as(embedded), self.token_index(mask.visible), embedded)
        decoded = self.decoder(filled)[:, self.prefix_tokens :]
        return self.decoder_head(get_at_index(decoded, mask.masked))
