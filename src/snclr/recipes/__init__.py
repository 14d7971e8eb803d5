"""Named settings. The docstring of each module gives the command, the cost and the expected results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from snclr.errors import UserError, did_you_mean, known_spelling
from snclr.recipes import cifar, cifar_cpu, demo, imagenet, photos


@dataclass(frozen=True)
class Recipe:
    """Named settings of a run, with SNCLR as the method.

    `scale` decides what another method takes from it: at scale "paper" its own paper's sizes (heads, queue, momentum,
    prototypes), at scale "small" the recipe's, which fit a small dataset and are equal for all methods.
    """

    summary: str
    scale: Literal["paper", "small"]
    settings: dict[str, Any]


def _imagenet(name: str, title: str, settings: dict[str, Any], epochs: tuple[int, ...]) -> dict[str, Recipe]:
    """Return one recipe per number of epochs; the longest has no suffix."""
    return {
        f"{name}-imagenet" + (f"-{count}ep" if count < max(epochs) else ""): Recipe(
            f"{title} on ImageNet as in the paper, {count} epochs", "paper", {**settings, "epochs": count}
        )
        for count in epochs
    }


RECIPES = {
    "photos": Recipe("a few thousand of your own photos, one GPU or a CPU (the default)", "small", photos.SETTINGS),
    "cifar": Recipe("32 × 32 images such as CIFAR-10, ResNet-18, one GPU", "small", cifar.SETTINGS),
    "cifar-cpu": Recipe("CIFAR-10 on two CPU cores, narrow ResNet, half an hour", "small", cifar_cpu.SETTINGS),
    "demo": Recipe("the images that come with the package, two CPU cores, a few minutes", "small", demo.SETTINGS),
    **_imagenet("resnet50", "ResNet-50", imagenet.RESNET50, (800, 100, 200, 400)),
    **_imagenet("vit-small", "ViT-S/16", {**imagenet.VIT, "encoder": "vit_small"}, (300, 100, 200)),
    **_imagenet("vit-base", "ViT-B/16", {**imagenet.VIT, "encoder": "vit_base"}, (300, 100, 200)),
}


def get_recipe(name: str) -> Recipe:
    """Return the recipe of this name; raise UserError with all names if there is none.

    >>> get_recipe("resnet50-imagenet-100ep").settings["epochs"]
    100
    """
    name = known_spelling(name, RECIPES)
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise UserError(f"there is no recipe {name!r}{hint}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
