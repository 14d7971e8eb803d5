"""Values of the methods' papers and official code that depend on the run: encoder, epochs, batch, image size, views.

`paper_settings` returns them for a method. They replace those of the recipe and of the config class; a given setting
replaces them. Values of the run itself (learning rate, crops, weight decay) are used with recipes of scale "paper"
only, since a recipe for less data has the same for every method. Exceptions: MAE and CAE have their own views and
AdamW, MAE its β2 and CAE its gradient clipping with every recipe, and local crops limit the area of the other crops.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a run on which the values of a method's paper depend."""

    encoder: str
    optimizer: str
    image_size: int
    epochs: int
    batch_size: int
    views: str
    prototypes: int
    local_crops: int
    tokenizer: str | None
    paper_scale: bool

    @property
    def vit(self) -> bool:
        """Whether the encoder is a ViT, by its name: the settings are resolved without building the encoder."""
        return self.encoder.startswith(("vit", "deit", "beit", "eva"))


def paper_settings(method: str, setup: Setup) -> dict[str, Any]:
    """Return the settings of a method that its paper or official code chooses by the run.

    >>> cifar = Setup(encoder="resnet18", optimizer="sgd", image_size=32, epochs=200, batch_size=512, views="cifar",
    ...               prototypes=512, local_crops=0, tokenizer=None, paper_scale=False)
    >>> paper_settings("simclr", cifar)
    {'temperature': 0.5}
    """
    return _BY_METHOD[method](setup) if method in _BY_METHOD else {}


def nearest_length(by_epochs: Mapping[int, Any], epochs: int) -> Any:
    """Return the value whose number of epochs is closest to `epochs` in ratio.

    >>> nearest_length({40: 0.97, 100: 0.99, 1000: 0.996}, 800)
    0.996
    """
    return by_epochs[min(by_epochs, key=lambda length: abs(math.log(epochs / length)))]


def _simclr(setup: Setup) -> dict[str, Any]:
    # The authors' temperature for CIFAR-10, here for all small images; 0.1 is that for ImageNet.
    small = {"temperature": 0.5} if setup.image_size <= 64 else {}
    return small | ({"views": "simclr"} if setup.paper_scale else {})


def _sgd(setup: Setup, views: str) -> dict[str, Any]:
    """Return views and optimizer of the methods whose authors train ResNets with SGD."""
    if not setup.paper_scale:
        return {}
    optimizer = {} if setup.vit else {"optimizer": "sgd", "lr": 0.03, "weight_decay": 1e-4}
    return {"views": views, **optimizer}


def _mocov2(setup: Setup) -> dict[str, Any]:
    if setup.views == "infomin":  # InfoMin's code is MoCo v2 with other views
        return {"temperature": 0.15, **_sgd(setup, "infomin")}
    return _sgd(setup, "mocov2")


def _mocov3(setup: Setup) -> dict[str, Any]:
    if setup.vit:
        heads = {"projector_layers": 3, "predictor_final_bn": True, "temperature": 0.2}
        return heads | ({"weight_decay_on": "all"} if setup.paper_scale else {})
    if not setup.paper_scale:
        return {}
    lengths = {
        100: {"lr": 0.6, "weight_decay": 1e-6, "momentum": 0.99},
        300: {"lr": 0.3, "weight_decay": 1e-6, "momentum": 0.99},
        1000: {"lr": 0.3, "weight_decay": 1.5e-6, "momentum": 0.996},
    }
    return {"crop_min": 0.2, **nearest_length(lengths, setup.epochs)}


def _byol(setup: Setup) -> dict[str, Any]:
    if setup.vit or not setup.paper_scale:  # BYOL has no ViT; a small recipe has its own momentum
        return {}
    lengths = {
        40: {"lr": 0.45, "weight_decay": 1e-6, "momentum": 0.97},
        100: {"lr": 0.45, "weight_decay": 1e-6, "momentum": 0.99},
        300: {"lr": 0.3, "weight_decay": 1e-6, "momentum": 0.99},
        1000: {"lr": 0.2, "weight_decay": 1.5e-6, "momentum": 0.996},
    }
    return nearest_length(lengths, setup.epochs)


def _swav(setup: Setup) -> dict[str, Any]:
    prototypes, batch = setup.prototypes, setup.batch_size
    # 3840 features with 3000 prototypes and a batch of 256, as in the authors' script.
    missing = 0 if batch >= prototypes else math.ceil((prototypes * 4 / 3 - batch) / batch) * batch
    start = 15 if setup.paper_scale else round(setup.epochs * 15 / 200)  # as early in the training as in that script
    crops = {"crop_min": 0.14} if setup.local_crops else {}
    return {"assignment_queue": missing, "assignment_queue_start": start, **crops}


def _dino(setup: Setup) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if setup.local_crops:
        settings["crop_min"] = 0.4 if setup.vit else 0.14
    elif setup.paper_scale:
        settings["crop_min"] = 0.14  # the authors' advice for training without local crops
    if setup.paper_scale:
        settings["clip_gradient"] = 3.0
        if setup.vit:
            settings |= {"lr": 5e-4, "warmup_epochs": 10, "weight_decay": 0.04, "weight_decay_end": 0.4}
            # The authors' ViT: learned positions and patch embedding, and the usual number of heads.
            settings |= {"drop_path": 0.1, "sincos": False, "freeze_patch_embed": False, "heads": None}
    return settings


def _masked(setup: Setup) -> dict[str, Any]:
    """Return what MAE and CAE have in common: crops and flips only, fixed positions, a trained patch embedding."""
    vit = {"sincos": True, "freeze_patch_embed": False, "stem": "auto"} if setup.vit else {}
    settings = {"views": "crops", "crop_min": 0.2, **vit}
    if setup.paper_scale:
        settings |= {"optimizer": "adamw", "weight_decay": 0.05}
    elif setup.optimizer != "adamw":  # the recipe's learning rate and weight decay are for its own optimizer
        settings |= {"optimizer": "adamw", "weight_decay": 0.05, "lr": 1e-3}
    return settings


def _mae(setup: Setup) -> dict[str, Any]:
    settings = {**_masked(setup), "beta2": 0.95}
    if setup.paper_scale:
        return {**settings, "lr": 1.5e-4, "warmup_epochs": 40, "heads": None}
    return {**settings, "decoder_dim": 128, "decoder_layers": 4, "decoder_heads": 4}


def _cae(setup: Setup) -> dict[str, Any]:
    # The authors' weight is for the cross-entropy of 8192 tokens, which is about ten times the error of normalized
    # pixels. With pixels it outweighs the prediction at first, and the features become nearly constant.
    weight = {"alignment_weight": 0.05} if setup.tokenizer is None else {}
    if not setup.paper_scale:
        return {**_masked(setup), "decoder_layers": 2, "regressor_layers": 2, "clip_gradient": 3.0, **weight}
    base_lr = 1.5e-3 * 256 / 2048  # the authors give the learning rate of a batch of 2048
    warmup = nearest_length({300: 10, 800: 20, 1600: 40}, setup.epochs)
    return {
        **_masked(setup), "crop_min": 0.08, "lr": base_lr, "warmup_epochs": warmup, "clip_gradient": 3.0,
        "drop_path": 0.1, **weight,
    }  # fmt: skip


_BY_METHOD: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "simclr": _simclr,
    "moco": partial(_sgd, views="moco"),
    "mocov2": _mocov2,
    "mocov3": _mocov3,
    "byol": _byol,
    "swav": _swav,
    "dino": _dino,
    "mae": _mae,
    "cae": _cae,
    "pirl": partial(_sgd, views="pirl"),
    "detco": partial(_sgd, views="mocov2"),
}
