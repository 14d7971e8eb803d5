"""List what is available: `snclr recipes`, `snclr encoders`, `snclr methods` and `snclr studies`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from snclr.cli.flags import Command
from snclr.cli.output import print_table


def recipes(recipe: str | None = None) -> dict[str, Any]:
    """List the recipes with their summaries, or the settings of one.

    Args:
        recipe: show the settings of this recipe
    """
    from snclr.recipes import RECIPES, get_recipe

    return {name: get_recipe(name).summary for name in RECIPES} if recipe is None else get_recipe(recipe).settings


def encoders(filter: str | None = None) -> list[str]:
    """List the encoders by name.

    Args:
        filter: show only names that contain this text, e.g. vit_small
    """
    from snclr.errors import UserError
    from snclr.models.encoders import list_encoders

    names = list_encoders(filter)
    if not names:
        raise UserError(f"no encoder's name contains {filter!r}; `snclr encoders` lists all")
    return names


def methods(method: str | None = None) -> dict[str, Any]:
    """List the methods with their papers, or the settings of one with their defaults.

    Args:
        method: show the settings that this method uses, with their defaults
    """
    from snclr.errors import UserError, did_you_mean, known_spelling
    from snclr.methods import METHODS

    if method is None:
        return {name: config.paper() for name, config in METHODS.items()}
    method = known_spelling(method, METHODS)
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}{did_you_mean(method, METHODS)}; choose one of {', '.join(METHODS)}")
    return {"paper": METHODS[method].paper(), **asdict(METHODS[method]())}


def studies(study: str | None = None) -> dict[str, Any]:
    """List the named studies of `snclr compare`, or the rows of one with the paper's figures.

    Args:
        study: show the rows of this study, with their settings and the figures of the paper
    """
    from snclr.studies.paper.named import STUDIES, describe_study, get_study

    if study is None:
        return {name: f"{one.source}: {one.title}" for name, one in STUDIES.items()}
    return describe_study(study, get_study(study))


def _show(entries: dict[str, Any] | list[str]) -> None:
    if isinstance(entries, list):
        print("\n".join(entries))
    else:
        print_table(["", ""], ((name, str(value)) for name, value in entries.items()), left=2)


COMMANDS = {
    "recipes": Command(function=recipes, show=_show, examples="Example:\n  snclr recipes cifar\n"),
    "encoders": Command(function=encoders, show=_show, examples="Example:\n  snclr encoders vit_small\n"),
    "methods": Command(function=methods, show=_show, examples="Example:\n  snclr methods byol\n"),
    "studies": Command(function=studies, show=_show, examples="Example:\n  snclr studies table-1-resnet50\n"),
}
