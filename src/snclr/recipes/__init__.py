"""Named settings, read from `recipes.yaml`; its comments give the command, the cost and the expected results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from snclr.errors import UserError, did_you_mean, known_spelling


@dataclass(frozen=True)
class Recipe:
    """Named settings of a run, with SNCLR as the method.

    `scale` decides what another method takes from it: at scale "paper" its own paper's sizes (heads, queue, momentum,
    prototypes), at scale "small" the recipe's, which fit a small dataset and are equal for all methods.
    """

    summary: str
    scale: Literal["paper", "small"]
    settings: dict[str, Any]


_FILE = Path(__file__).with_name("recipes.yaml")
RECIPES = {name: Recipe(**parts) for name, parts in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}


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
