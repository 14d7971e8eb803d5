"""Equal tuning: the same number of trials for every row, on a seed and on images that no reported result uses."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snclr.errors import UserError
from snclr.studies.runs import Row, parse_value, row_setting

TUNE_SEED = 1_000_000
"""Default seed of the tuning runs."""
_FACTOR = re.compile(r"x\d*\.?\d+(?:e-?\d+)?")
_SYNTAX = "--tune takes NAME=A,B,... with at least two values, e.g. lr=0.002,0.004 or lr=x0.5,x1,x2, not {text!r}"


@dataclass(frozen=True)
class Factor:
    """A multiple of a row's own value, written `x2`."""

    factor: float

    def __str__(self) -> str:
        return f"x{self.factor:g}"


@dataclass(frozen=True)
class Axis:
    """The values of one setting, with other settings for rows that do not have the first."""

    choices: tuple[tuple[str, tuple[Any, ...]], ...]
    """Names and their values, equally many for every name."""

    def __len__(self) -> int:
        return len(self.choices[0][1])

    def __str__(self) -> str:
        texts = [f"{name} in {{{', '.join(map(str, values))}}}" for name, values in self.choices]
        return ", else ".join(texts)


@dataclass(frozen=True)
class Trial:
    """One tuning run of a row: the settings it tries, and its seed."""

    settings: dict[str, Any]
    seed: int


def parse_tune(texts: Sequence[str]) -> list[Axis]:
    """Parse the axes of the tuning grid; `/` separates alternatives for methods without a setting, `none` has no axes.

    >>> [str(axis) for axis in parse_tune(["lr=0.1,0.2,momentum=0.9,0.99/weight_decay=x1,x5"])]
    ['lr in {0.1, 0.2}', 'momentum in {0.9, 0.99}, else weight_decay in {x1, x5}']
    """
    if list(texts) == ["none"]:
        return []
    parts = [part for text in texts for part in re.split(r",(?=\s*[A-Za-z_-]+=)", text)]
    axes = [Axis(tuple(_parse_choice(choice, part) for choice in part.split("/"))) for part in parts]
    for axis, part in zip(axes, parts, strict=True):
        if len({len(values) for _, values in axis.choices}) > 1:
            raise UserError(f"--tune {part}: give equally many values for every alternative, so that trials are equal")
    firsts = [axis.choices[0][0] for axis in axes]
    if len(set(firsts)) < len(firsts):
        raise UserError(f"--tune names {max(firsts, key=firsts.count)} twice; give all its values in one list")
    return axes


def _parse_choice(text: str, whole: str) -> tuple[str, tuple[Any, ...]]:
    name, _, values = text.partition("=")
    parts = [value.strip() for value in values.split(",") if value.strip()]
    if len(set(parts)) < 2 or len(set(parts)) < len(parts):
        raise UserError(_SYNTAX.format(text=whole))
    name = row_setting(name, "--tune")
    return name, tuple(Factor(float(p[1:])) if _FACTOR.fullmatch(p) else parse_value(name, p) for p in parts)


def count_trials(axes: Sequence[Axis]) -> int:
    """Return the number of trials of every row, 0 without tuning."""
    return math.prod(map(len, axes)) if axes else 0


def row_trials(row: Row, axes: Sequence[Axis], resolved: Mapping[str, Any], seed: int) -> list[Trial]:
    """Return the trials of a row; `resolved` are all settings of its runs.

    A row that has no setting of an axis repeats the other trials with further seeds, one for each value of that axis:
    every row has equally many runs. An untrained row has nothing to tune.
    """
    if row.untrained:
        return []
    picked = _pick(row, axes, resolved)
    trials = []
    for position in itertools.product(*(range(len(axis)) for axis in axes)):
        settings: dict[str, Any] = {}
        repeat = 0
        for axis, choice, index in zip(axes, picked, position, strict=True):
            if choice is None:
                repeat = repeat * len(axis) + index
            else:
                settings[choice[0]] = _value(row, choice[0], choice[1][index], resolved)
        trials.append(Trial(settings, seed + repeat))
    return trials if axes else []


def _pick(row: Row, axes: Sequence[Axis], resolved: Mapping[str, Any]) -> list[tuple[str, tuple[Any, ...]] | None]:
    """Return for each axis the first setting that the row has and that is not tuned already; None if it has none."""
    picked: list[tuple[str, tuple[Any, ...]] | None] = []
    for axis in axes:
        taken = {choice[0] for choice in picked if choice is not None}
        has = [choice for choice in axis.choices if choice[0] in resolved and choice[0] not in taken]
        free = [choice for choice in has if choice[0] not in row.settings]
        if has and not free:
            raise UserError(f"{row.label!r} and --tune both set {has[0][0]}; leave one of them out")
        picked.append(free[0] if free else None)
    return picked


def _value(row: Row, name: str, value: Any, resolved: Mapping[str, Any]) -> Any:
    """Return the value to try; a factor multiplies the row's own value."""
    if not isinstance(value, Factor):
        return value
    own = resolved[name]
    if isinstance(own, bool) or not isinstance(own, (int, float)):
        raise UserError(f"--tune {name}={value}: {row.label!r} has {name}={own}, which is not a number. Give values.")
    return max(1, round(own * value.factor)) if isinstance(own, int) else float(f"{own * value.factor:.6g}")


def best_trial(trials: Sequence[Trial], scores: Mapping[int, float]) -> dict[str, Any] | None:
    """Return the settings with the highest mean score over their seeds, the first of equals; None without a score.

    `scores` are by position in `trials`. Settings with a failed trial count with the remaining seeds.
    """
    by_settings: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for position, trial in enumerate(trials):
        if position in scores:
            by_settings.setdefault(repr(trial.settings), (trial.settings, []))[1].append(scores[position])
    if not by_settings:
        return None
    return max(by_settings.values(), key=lambda entry: statistics.fmean(entry[1]))[0]
