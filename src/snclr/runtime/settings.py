"""Settings as dataclass fields: the type gives the choices and the range, the docstring below the field gives the help.

>>> class Config(Settings):
...     epochs: Count = 100
>>> describe(Config)["epochs"].check(0)
Traceback (most recent call last):
snclr.errors.UserError: epochs must be a whole number (at least 1), not 0
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from snclr.errors import UserError, american, did_you_mean, known_spelling

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # only type checkers need it

    def dataclass_transform(**_: Any) -> Any:
        """Leave the class as it is."""
        return lambda cls: cls


RENAMED_SETTINGS = {"accelerator": "device", "weights": "neighbor_weights"}
"""Settings that had another name in earlier versions: that name and the present one. Both are accepted."""


@dataclass(frozen=True)
class Range:
    """Bounds of a finite number, for use in `Annotated[float, Range(gt=0)]`."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        return " and ".join(f"{text} {bound:,.10g}" for text, bound in bounds.items() if math.isfinite(bound))


Count = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
NonNegative = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(gt=0, le=1)]

_TYPE_NAMES: dict[type, str] = {
    type(None): "none", int: "a whole number", float: "a number", bool: "true or false", str: "text"
}  # fmt: skip
_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings: a subclass is a frozen dataclass with keyword-only fields."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True)
class Setting:
    """One field of a config dataclass, as a flag or a check needs it."""

    name: str
    hint: Any
    """Type hint, without the range."""
    types: tuple[type, ...]
    """Types of a value that is not one of `choices`, e.g. (int, NoneType)."""
    choices: tuple[str, ...]
    range: Range
    default: Any
    help: str

    def check(self, value: Any) -> Any:
        """Return the value, an int converted if a float is expected. Raise UserError if it is not allowed.

        A choice may be spelled with other case, hyphens or underscores.
        """
        if float in self.types and type(value) is int:
            value = float(value)
        if isinstance(value, str):
            value = known_spelling(value, self.choices)
        in_range = not isinstance(value, (int, float)) or value in self.range
        if (isinstance(value, str) and value in self.choices) or (type(value) in self.types and in_range):
            return value
        if not self.types:
            allowed = f"one of {', '.join(self.choices)}"
        else:
            bounds = f" ({self.range})" if str(self.range) else ""
            names = [_TYPE_NAMES.get(kind, kind.__name__) + bounds * (kind in (int, float)) for kind in self.types]
            allowed = " or ".join([*names, *self.choices])
        raise UserError(f"{self.name} must be {allowed}, not {value!r}{did_you_mean(str(value), self.choices)}")

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for on a command line; `check` tests its range."""
        for kind in self.types if text not in self.choices else ():
            with suppress(ValueError, TypeError, KeyError):
                return _BOOLEANS[text.lower()] if kind is bool else kind(text)
        return self.check(text)


def current_name(name: str) -> str:
    """Return the present name of a setting, or of its flag, in American spelling.

    >>> current_name("neighbours"), current_name("accelerator"), current_name("--accelerator")
    ('neighbors', 'device', '--device')
    """
    name = american(name)
    if name.startswith("--"):
        return "--" + current_name(name[2:].replace("-", "_")).replace("_", "-") if len(name) > 2 else name
    return RENAMED_SETTINGS.get(name, name)


@functools.cache
def describe(config: Any) -> dict[str, Setting]:
    """Return the settings of a config dataclass by name, in the order of its fields."""
    hints, plain_hints = typing.get_type_hints(config, include_extras=True), typing.get_type_hints(config)
    settings = {}
    for field in dataclasses.fields(config):
        parts = _parts(hints[field.name])
        settings[field.name] = Setting(
            name=field.name,
            hint=plain_hints[field.name],
            types=tuple(part for part in parts if isinstance(part, type)),
            choices=tuple(part for part in parts if isinstance(part, str)),
            range=next((part for part in parts if isinstance(part, Range)), Range()),
            default=field.default,
            help=_field_docstrings(config.__module__).get(field.name, ""),
        )
    return settings


def check_devices(devices: str) -> None:
    """Raise UserError unless `devices` is "auto" or a number of ranks."""
    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        raise UserError(f"devices must be auto or a number of at least 1, not {devices!r}")


def check_fields(config: Any, part: type | None = None) -> None:
    """Check every field of a frozen config dataclass, or those of its base `part`; call it from `__post_init__`."""
    for name, setting in describe(part or type(config)).items():
        object.__setattr__(config, name, setting.check(getattr(config, name)))


def _parts(hint: Any) -> list[Any]:
    """Return the types, literal values and ranges in a type hint."""
    return [part for argument in typing.get_args(hint) for part in _parts(argument)] or [hint]


@functools.cache
def _field_docstrings(module: str) -> dict[str, str]:
    """Return the docstring below each field in a module; a field of several classes has its docstring below one."""
    import docstring_parser

    docs = docstring_parser.parse_from_object(sys.modules[module]).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in docs}
