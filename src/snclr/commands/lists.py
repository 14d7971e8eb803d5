"""`snclr recipes`, `snclr encoders`, `snclr methods`: what there is."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the three."""
    if name == "encoders":
        parser.add_argument("filter", nargs="?", help="show only names that contain this, e.g. vit_small")
    if name == "recipes":
        parser.add_argument("recipe", nargs="?", help="show the settings of this one")
    if name == "methods":
        parser.add_argument("method", nargs="?", help="show the settings that this one uses, and its defaults")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(handler=functools.partial(_run, name))


def _run(name: str, arguments: argparse.Namespace) -> int:
    found = {"recipes": _recipes, "encoders": _encoders, "methods": _methods}[name](arguments)
    if arguments.json:
        print(json.dumps(found))
    elif isinstance(found, dict):
        width = max(map(len, found), default=0)
        for key, value in found.items():
            print(f"{key:{width}}  {value}")
    else:
        print("\n".join(found))
    return 0


def _recipes(arguments: argparse.Namespace) -> dict[str, Any]:
    from snclr.recipes import RECIPES, get_recipe

    if arguments.recipe:
        return get_recipe(arguments.recipe).settings
    return {name: get_recipe(name).summary for name in RECIPES}


def _encoders(arguments: argparse.Namespace) -> list[str]:
    from snclr.encoders import list_encoders
    from snclr.errors import UserError

    names = list_encoders(arguments.filter)
    if not names:
        raise UserError(f"no encoder's name contains {arguments.filter!r}; `snclr encoders` lists all")
    return names


def _methods(arguments: argparse.Namespace) -> dict[str, Any]:
    from snclr.methods import METHODS

    if arguments.method:
        return _method(arguments.method)
    return {name: info.paper for name, info in METHODS.items()}


def _method(name: str) -> dict[str, Any]:
    """A method's paper and every setting it uses, with the value it has unless a recipe or a flag says otherwise."""
    import dataclasses
    import difflib

    from snclr.config import PretrainConfig
    from snclr.errors import UserError
    from snclr.methods import METHODS

    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"there is no method {name!r}{hint}; there are: {', '.join(METHODS)}")
    info = METHODS[name]
    own = info.defaults | info.full_size
    used = {f.name: own.get(f.name, f.default) for f in dataclasses.fields(PretrainConfig) if f.name in info.settings}
    return {"paper": info.paper, **used}
