"""Named settings. Each recipe is a page whose docstring gives its command, its cost and what to expect of it."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from snclr.errors import UserError

# name → module; resnet50-imagenet and the ViTs exist at each of the paper's lengths.
RECIPES: dict[str, str] = {
    "photos": "photos",
    "cifar": "cifar",
    "cifar-cpu": "cifar_cpu",
    "demo": "demo",
    "resnet50-imagenet": "resnet50_imagenet",
    "resnet50-imagenet-100ep": "resnet50_imagenet",
    "resnet50-imagenet-200ep": "resnet50_imagenet",
    "resnet50-imagenet-400ep": "resnet50_imagenet",
    "vit-small-imagenet": "vit_imagenet",
    "vit-small-imagenet-100ep": "vit_imagenet",
    "vit-small-imagenet-200ep": "vit_imagenet",
    "vit-base-imagenet": "vit_imagenet",
    "vit-base-imagenet-100ep": "vit_imagenet",
    "vit-base-imagenet-200ep": "vit_imagenet",
}


@dataclass(frozen=True)
class Recipe:
    """Settings under a name."""

    name: str
    summary: str
    settings: dict[str, Any]


def get_recipe(name: str) -> Recipe:
    """The recipe of that name, or a UserError that lists what there is.

    >>> get_recipe("resnet50-imagenet-100ep").settings["epochs"]
    100
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"there is no recipe {name!r}{hint}; there are: {', '.join(RECIPES)}")
    module = importlib.import_module(f"snclr.recipes.{RECIPES[name]}")
    recipe: Recipe = module.recipes()[name]
    return recipe
