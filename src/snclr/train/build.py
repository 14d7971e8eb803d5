"""Build the parts of a run from its config: encoder, method, views, and the task that trains them."""

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from snclr.checkpoint.external_weights import read_weights
from snclr.data.datasets.base import open_dataset
from snclr.data.loader import ViewLoader
from snclr.data.open_on_ranks import open_on_all_ranks
from snclr.data.transforms.views import PLAIN_VIEW, VIEW_GROUPS, ViewSettings, local_view
from snclr.distributed.collectives import check_equal_across_ranks, raise_on_all_ranks
from snclr.distributed.sync_batch_norm import synchronize_batch_norm
from snclr.errors import UserError
from snclr.methods.base import Method
from snclr.methods.common.ema import auto_momentum
from snclr.models.activation_checkpointing import checkpoint_activations
from snclr.models.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.models.vit import accept_size, has_plain_patches, set_drop_path
from snclr.runtime.memory import image_cache_bytes
from snclr.runtime.progress import set_status
from snclr.train.config import PretrainConfig, fit_queue
from snclr.train.optim import build_optimizer, scaled_lr
from snclr.train.pretrain_task import PretrainTask


def build_task(
    config: PretrainConfig, fabric: Any, *, init_from: str | None = None, resumed: bool = False
) -> PretrainTask:
    """Open the images and build loader, method and optimizer on this rank's device; write no files.

    `init_from` gives the initial weights of the encoders: another run, a weights file or "pretrained". The config of
    the task has the numbers that depend on the dataset: momentum "auto" and, unless the run is `resumed`, the length of
    the queue.
    """
    set_status(f"opening {config.data}")
    dataset = open_on_all_ranks(lambda: open_dataset(config.data, split="train", download=True))
    check_equal_across_ranks(dataset.fingerprint, f"images in {config.data}")
    config = resolve_momentum(config, len(dataset))
    labels = dataset.labels
    ranks_per_machine = getattr(fabric.strategy, "num_processes", 1)  # each has its own cache
    loaded: list[str] = []
    with raise_on_all_ranks():
        config = config if resumed else fit_queue(config, len(dataset))
        loader = ViewLoader(
            dataset, views=view_settings(config), image_size=config.image_size, sizes=view_sizes(config),
            batch_size=config.batch_size, seed=config.seed, workers=config.workers, rank=fabric.global_rank,
            world_size=fabric.world_size, device=fabric.device, max_bad_share=config.max_bad_share,
            cache_bytes=image_cache_bytes(config.cache_images) // ranks_per_machine,
        )  # fmt: skip
        set_status(f"building {config.encoder}")
        spec = encoder_spec(config)
        classes = None if labels is None or len(labels) == 0 else int(labels.max()) + 1
        method: Any = build_method(config, spec, classes, len(dataset))
        if init_from is not None:
            loaded = initialize_encoders(method.encoders, spec, init_from)
        apply_memory_settings(method, config)
    method = synchronize_batch_norm(method.to(fabric.device)).train()
    for encoder in method.encoders:
        encoder.to(memory_format=torch.channels_last)
    if config.compile:
        method.compile_parts()
    # Fabric does not clip the gradients that a fused optimizer would unscale.
    optimizer = optimizer_for(method, config, fused=fabric.device.type == "cuda" and config.precision != "16")
    wrapped, wrapped_optimizer = fabric.setup(method, optimizer)
    return PretrainTask(config, fabric, dataset, loader, spec, method, wrapped, wrapped_optimizer, loaded)


def optimizer_for(method: Method, config: PretrainConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return the run's optimizer over the trained parameters of the method."""
    return build_optimizer(
        config.optimizer, method.named_parameters(), lr=scaled_lr(config.lr, config.batch_size),
        weight_decay=config.weight_decay, weight_decay_on=config.weight_decay_on, constant_lr=method.constant_lr,
        beta2=config.beta2, fused=fused,
    )  # fmt: skip


def resolve_momentum(config: PretrainConfig, images: int) -> PretrainConfig:
    """Replace the momentum "auto" by the number for a dataset of this many images."""
    if getattr(config.method_config, "momentum", None) != "auto":
        return config
    momentum = round(auto_momentum(config.batch_size, images), 6)
    return replace(config, method_config=replace(config.method_config, momentum=momentum))  # type: ignore[call-arg]


def encoder_spec(config: PretrainConfig) -> EncoderSpec:
    """Return the description of the run's encoder."""
    options = ("image_size", "stem", "heads", "sincos", "freeze_patch_embed")
    return resolve_encoder(config.encoder, **{name: getattr(config, name) for name in options})


def build_method(
    config: PretrainConfig, spec: EncoderSpec, classes: int | None = None, images: int | None = None
) -> Method:
    """Return the method with new weights, which depend only on the seed.

    `classes` is the number of classes in the data, None without labels; only a method that needs labels uses it.
    `images` is the number of images, for a method with a memory bank.
    """
    if config.method_config.needs_labels and classes is None:
        raise UserError(
            f"method {config.method} needs labels, and {config.data or 'the data'} has none. Use one folder per class,"
            " or choose another --method."
        )
    method_class = pkgutil.resolve_name(config.method_config.implementation)
    torch.manual_seed(config.seed)
    encoder = build_encoder(spec, zero_init_residual=config.zero_init_residual)
    if config.method_config.masks_patches and not has_plain_patches(encoder):
        raise UserError(
            f"method {config.method} masks the patches of a plain ViT, and {config.encoder} is not one. Choose a ViT"
            " such as --encoder vit_tiny, or another --method."
        )
    offered = {"classes": classes, "images": images, "seed": config.seed}
    options = {name: offered[name] for name in config.method_config.takes}
    method: Method = method_class(encoder, spec.num_features, config.method_config, **options)
    if config.drop_path > 0:  # after the target network was copied, which skips no blocks
        set_drop_path(method.encoder, config.drop_path, config.encoder)
    if getattr(config.method_config, "local_crops", 0):
        accept_size(method.encoder, view_sizes(config)[-1], config.encoder)
    return method


def apply_memory_settings(method: Method, config: PretrainConfig) -> None:
    """Apply the settings that trade time for memory; raise UserError if the encoder does not support them."""
    if config.method_config.masks_patches and (config.activation_checkpointing or config.micro_batch):
        raise UserError(
            f"--activation-checkpointing and --micro-batch do not support --method {config.method}. Its encoder sees "
            "only some patches; reduce --batch-size if memory is short."
        )
    if config.activation_checkpointing:
        checkpoint_activations(method.encoder, config.encoder)
    if config.micro_batch and any(isinstance(layer, _BatchNorm) for layer in method.encoder.modules()):
        raise UserError(
            f"--micro-batch needs an encoder without batch norm, such as vit_small; {config.encoder} normalizes over"
            " the whole batch. Use --activation-checkpointing instead."
        )
    method.micro_batch = config.micro_batch


def view_settings(config: PretrainConfig) -> tuple[ViewSettings, ...]:
    """Return the augmentation settings of the two views, and of those that follow: the plain view or local crops.

    A method that masks patches has one view.
    """
    views: tuple[ViewSettings, ...] = VIEW_GROUPS[config.views][: 1 if config.method_config.masks_patches else 2]
    if config.crop_min is not None:
        views = tuple(replace(view, crop_min=config.crop_min) for view in views)
    if local_crops := getattr(config.method_config, "local_crops", 0):
        return (*views, *[local_view(views[0])] * local_crops)
    plain = getattr(config.method_config, "search_view", "augmented") == "plain"
    return (*views, PLAIN_VIEW) if plain else views


def view_sizes(config: PretrainConfig) -> tuple[int, ...]:
    """Return the side of each view of `view_settings` in pixels."""
    views, method = len(view_settings(config)), config.method_config
    local_crops = getattr(method, "local_crops", 0)
    local_size = getattr(method, "local_size", None) or default_local_size(config.image_size)
    return (config.image_size,) * (views - local_crops) + (local_size,) * local_crops


def default_local_size(image_size: int) -> int:
    """Return about 3/7 of the image size, as a multiple of the patch size of a ViT for that image size.

    >>> [default_local_size(size) for size in (224, 128, 64, 32)]
    [96, 48, 24, 16]
    """
    step = 16 if image_size >= 128 else 8
    return max(8, round(image_size * 3 / 7 / step) * step)


def initialize_encoders(encoders: Sequence[torch.nn.Module], spec: EncoderSpec, source: str) -> list[str]:
    """Load the weights of another run, a weights file or "pretrained" into every encoder.

    Return a line about what was loaded, and warnings.
    """
    weights = read_weights(source, spec)
    for encoder in encoders:
        encoder.load_state_dict(weights.state)
    return [f"initial weights: {weights.report}", *(f"warning: {text}" for text in weights.warnings)]
