"""Build encoder, method and views from the config of a run."""

from __future__ import annotations

import pkgutil
from dataclasses import replace

import torch

from snclr.data.transforms.views import VIEW_GROUPS, ViewSettings
from snclr.errors import UserError
from snclr.methods.base import Method
from snclr.models.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.train.config import PretrainConfig


def encoder_spec(config: PretrainConfig) -> EncoderSpec:
    """Return the description of the run's encoder."""
    return resolve_encoder(
        config.encoder,
        image_size=config.image_size,
        stem=config.stem,
        heads=config.heads,
        sincos=config.sincos,
        freeze_patch_embed=config.freeze_patch_embed,
    )


def build_method(config: PretrainConfig, spec: EncoderSpec, classes: int | None = None) -> Method:
    """Return the method with new weights, which depend only on the seed.

    `classes` is the number of classes in the data, None without labels; only a method that needs labels uses it.
    """
    needs_labels = config.method_config.needs_labels
    if needs_labels and classes is None:
        raise UserError(
            f"method {config.method} needs labels, and {config.data or 'the data'} has none. Use one folder per class,"
            " or choose another --method."
        )
    method_class = pkgutil.resolve_name(config.method_config.implementation)
    torch.manual_seed(config.seed)
    encoder = build_encoder(spec)
    options = {"classes": classes} if needs_labels else {}
    return method_class(encoder, spec.num_features, config.method_config, **options)


def view_groups(config: PretrainConfig) -> tuple[ViewSettings, ViewSettings]:
    """Return the augmentation settings of the two views."""
    first, second = VIEW_GROUPS[config.views]
    if config.crop_min is None:
        return first, second
    return replace(first, crop_min=config.crop_min), replace(second, crop_min=config.crop_min)
