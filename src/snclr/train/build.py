"""From settings to the objects of a run: each builder takes the flat config and hands plain arguments on."""

from __future__ import annotations

import dataclasses
import importlib

import torch

from snclr.config import PretrainConfig
from snclr.data.views import VIEW_GROUPS, ViewSettings
from snclr.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.errors import UserError
from snclr.methods import METHODS
from snclr.methods.base import Method


def encoder_spec(config: PretrainConfig) -> EncoderSpec:
    """What the encoder of a run is."""
    return resolve_encoder(
        config.encoder,
        image_size=config.image_size,
        stem=config.stem,
        heads=config.heads,
        sincos=config.sincos,
        freeze_patch_embed=config.freeze_patch_embed,
    )


def build_method(config: PretrainConfig, spec: EncoderSpec, classes: int | None = None) -> Method:
    """The method with fresh weights, which depend on the seed alone.

    `classes` is how many the data has, None without labels; only a method that learns from labels looks at it.
    """
    info = METHODS[config.method]
    page = importlib.import_module(f"snclr.methods.{info.module}")
    settings = {name: getattr(config, name) for name in info.settings - {"preset"}}  # a preset names settings
    if info.needs_labels:
        if classes is None:
            raise UserError(
                f"method {config.method} learns from labels, and {config.data or 'the data'} has none: put the images"
                " of each class into a folder of its own, or choose another --method"
            )
        settings["classes"] = classes
    torch.manual_seed(config.seed)
    encoder = build_encoder(spec)
    method: Method = page.build(encoder, spec.num_features, **settings)
    return method


def view_groups(config: PretrainConfig) -> tuple[ViewSettings, ViewSettings]:
    """The two augmentation groups, with the crop the config asks for."""
    if config.views not in VIEW_GROUPS:
        raise UserError(f"views must be one of {', '.join(VIEW_GROUPS)}, not {config.views!r}")
    first, second = VIEW_GROUPS[config.views]
    if config.crop_min is None:
        return first, second
    return (
        dataclasses.replace(first, crop_min=config.crop_min),
        dataclasses.replace(second, crop_min=config.crop_min),
    )
