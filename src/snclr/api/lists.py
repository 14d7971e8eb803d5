"""What is available: the functions behind `snclr recipes`, `encoders`, `methods` and `studies`."""

from dataclasses import asdict
from typing import Any

from snclr.errors import UserError


def list_recipes(recipe: str | None = None) -> dict[str, Any]:
    """List the recipes with their summaries, or the settings of one.

    Args:
        recipe: Show the settings of this recipe.
    """
    from snclr.recipes import RECIPES, get_recipe

    return {name: get_recipe(name).summary for name in RECIPES} if recipe is None else get_recipe(recipe).settings


def list_encoders(filter: str | None = None) -> list[str]:
    """List the encoders by name.

    Args:
        filter: Show only names that contain this text, e.g. vit_small.
    """
    from snclr.models import encoders

    names = encoders.list_encoders(filter)
    if not names:
        raise UserError(f"no encoder's name contains {filter!r}; `snclr encoders` lists all")
    return names


def list_methods(method: str | None = None) -> dict[str, Any]:
    """List the methods with their papers, or the settings of one with their defaults.

    Args:
        method: Show the settings that this method uses, with their defaults.
    """
    from snclr.methods import METHODS
    from snclr.runtime.settings import describe
    from snclr.train.config import PretrainConfig

    if method is None:
        return {name: config.paper() for name, config in METHODS.items()}
    config = METHODS[describe(PretrainConfig)["method"].check(method)]
    return {"paper": config.paper(), **asdict(config())}


def list_studies(study: str | None = None) -> dict[str, Any]:
    """List the named studies of `snclr compare`, or the rows of one with the paper's results.

    Args:
        study: Show the rows of this study, with their settings and the results of the paper.
    """
    from snclr.studies.paper import describe_study, get_study, named_studies

    if study is None:
        return {name: f"{one.source}: {one.title}" for name, one in named_studies().items()}
    return describe_study(study, get_study(study))
