"""What is available: the functions behind `snclr recipes`, `encoders`, `methods` and `studies`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from snclr.errors import UserError, did_you_mean, known_spelling


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

    if method is None:
        return {name: config.paper() for name, config in METHODS.items()}
    method = known_spelling(method, METHODS)
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}{did_you_mean(method, METHODS)}; choose one of {', '.join(METHODS)}")
    return {"paper": METHODS[method].paper(), **asdict(METHODS[method]())}


def list_studies(study: str | None = None) -> dict[str, Any]:
    """List the named studies of `snclr compare`, or the rows of one with the paper's results.

    Args:
        study: Show the rows of this study, with their settings and the results of the paper.
    """
    from snclr.studies.paper.named import STUDIES, describe_study, get_study

    if study is None:
        return {name: f"{one.source}: {one.title}" for name, one in STUDIES.items()}
    return describe_study(study, get_study(study))
