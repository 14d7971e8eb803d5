"""From settings to the objects of a run: each builder takes the flat config and hands plain arguments on."""

from __future__ import annotations

import dataclasses

import torch

from snclr.config import PretrainConfig
from snclr.data.views import VIEW_GROUPS, ViewSettings
from snclr.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.errors import UserError
from snclr.heads import mlp
from snclr.methods.snclr import SNCLR
from snclr.soft_neighbors import SoftNeighborLoss, SoftNeighborSettings


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


def build_method(config: PretrainConfig, spec: EncoderSpec) -> SNCLR:
    """The method with fresh weights, which depend on the seed alone."""
    torch.manual_seed(config.seed)
    encoder = build_encoder(spec)
    head = {"final_bn": config.final_bn}
    projector = mlp(spec.num_features, config.hidden, config.dim, layers=config.projector_layers, **head)
    predictor = mlp(config.dim, config.hidden, config.dim, layers=config.predictor_layers, **head)
    criterion = SoftNeighborLoss(
        config.dim, config.queue_length, soft_neighbor_settings(config), queue_dtype=getattr(torch, config.queue_dtype)
    )
    return SNCLR(
        encoder,
        projector,
        predictor,
        criterion,
        momentum=config.momentum,
        momentum_schedule=config.momentum_schedule,
        push=config.push,
        neighbor_free_epochs=config.neighbor_free_epochs,
    )


def soft_neighbor_settings(config: PretrainConfig) -> SoftNeighborSettings:
    """The method's part of the settings."""
    gamma = config.gamma
    return SoftNeighborSettings(
        neighbors=config.neighbors,
        tau=config.temperature,
        form=config.loss_form,
        sides=config.sides,
        gamma="max" if isinstance(gamma, str) else gamma,
        weights=config.weights,
        attention=config.attention,
        attention_temperature=config.attention_temperature,
        attention_gradient=config.attention_gradient,
        times_2tau=config.times_2tau,
    )


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
