"""Equal conditions of a comparison: budget, tuning, and test images that are not trained on.

Budgets are optimizer steps, images seen or seconds; every row trains the whole epochs nearest to the budget. Every row
has the same number of tuning trials, on a seed and on images that no reported result uses.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snclr.data.info import DatasetInfo
from snclr.errors import UserError, count, did_you_mean
from snclr.methods import METHODS
from snclr.studies.options import StudyOptions
from snclr.studies.runs import Evaluation, Row, parse_value, row_setting
from snclr.train.config import resolve

if TYPE_CHECKING:
    from snclr.data.datasets.base import ImageDataset, Labels

BUDGETS = ("steps", "images", "seconds")
CALIBRATION_STEPS = 20
"""Steps that are measured for each row if the budget is in seconds."""
USUAL_VIEWS = 2
"""Full views per image that `--epochs` stand for in a budget of images seen."""
TUNE_SEED = 1_000_000
"""Default seed of the tuning runs."""
_FACTOR = re.compile(r"x\d*\.?\d+(?:e-?\d+)?")
_SYNTAX = "--tune takes NAME=A,B,... with at least two values, e.g. lr=0.002,0.004 or lr=x0.5,x1,x2, not {text!r}"


@dataclass(frozen=True)
class Budget:
    """What is equal for all rows, and how much of it (None: what `--epochs` amount to)."""

    kind: str = "steps"
    amount: float | None = None

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}={self.amount:g}"


def parse_budget(text: str | None) -> Budget:
    """Parse `steps`, `images` or `seconds`, or one of them with an amount.

    >>> parse_budget("seconds=600")
    Budget(kind='seconds', amount=600.0)
    """
    kind, equals, number = (text or "steps").partition("=")
    kind = kind.strip()
    if kind not in BUDGETS:
        raise UserError(f"--budget must be one of {', '.join(BUDGETS)}, not {kind!r}{did_you_mean(kind, BUDGETS)}")
    if not equals:
        return Budget(kind)
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise UserError(f"--budget {text}: the amount must be a positive number, e.g. {kind}=600")
    return Budget(kind, amount)


def images_seen_per_step(given: Mapping[str, Any]) -> float:
    """Return the images seen in a step: the views of the batch, each counted by its share of a full view's pixels.

    Two views count 2 for each image of the batch; six small views of 96 pixels beside two of 224 add 6 × (96/224)².
    A view that passes two networks counts once.
    """
    from snclr.train.build import view_sizes

    config = resolve(given)
    return config.batch_size * sum((size / config.image_size) ** 2 for size in view_sizes(config))


def measured_seconds(record: Mapping[str, Any]) -> float:
    """Return the seconds per step of a calibration: CPU seconds of the process, on a GPU wall time with data."""
    cost = record["cost"]
    on_cpu = record["where"].get("accelerator", "cpu") == "cpu"
    return float(cost["cpu_seconds_per_step"] if on_cpu else cost["seconds_with_views"])


def nearest_epochs(amount: float, per_step: float, steps_per_epoch: int) -> int:
    """Return the whole epochs, at least one, whose cost is nearest to the amount.

    >>> nearest_epochs(1000, per_step=2.0, steps_per_epoch=46)
    11
    """
    return max(1, round(amount / (per_step * steps_per_epoch)))


class Factor(float):
    """A multiple of a row's own value, written `x2`."""

    def __str__(self) -> str:
        return f"x{self:g}"


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


def row_trials(
    row: Row, axes: Sequence[Axis], resolved: Mapping[str, Any], seed: int
) -> list[tuple[dict[str, Any], int]]:
    """Return the trials of a row: the settings to try, and the seed. `resolved` are all settings of its runs.

    Of each axis, the row takes the first setting that it has and that no earlier axis tunes. If it has none, it repeats
    the other trials with further seeds, one for each value of that axis: every row has equally many runs. An untrained
    row has nothing to tune.
    """
    if row.untrained or not axes:
        return []
    tuned: set[str] = set()
    values_of_axes: list[list[dict[str, Any]]] = []
    for axis in axes:
        own = {name: values for name, values in axis.choices if name in resolved and name not in tuned}
        name = next((name for name in own if name not in row.settings), None)
        if name is not None:
            tuned.add(name)
            values_of_axes.append([{name: _value(row, name, value, resolved)} for value in own[name]])
        elif own:
            raise UserError(f"{row.label!r} and --tune both set {next(iter(own))}; leave one of them out")
        else:
            values_of_axes.append([{}] * len(axis))
    trials: list[tuple[dict[str, Any], int]] = []
    for values in itertools.product(*values_of_axes):
        settings = {name: value for part in values for name, value in part.items()}
        trials.append((settings, seed + sum(earlier == settings for earlier, _ in trials)))
    return trials


def _value(row: Row, name: str, value: Any, resolved: Mapping[str, Any]) -> Any:
    """Return the value to try; a factor multiplies the row's own value."""
    if not isinstance(value, Factor):
        return value
    own = resolved[name]
    if isinstance(own, bool) or not isinstance(own, (int, float)):
        raise UserError(f"--tune {name}={value}: {row.label!r} has {name}={own}, which is not a number. Give values.")
    return max(1, round(own * value)) if isinstance(own, int) else float(f"{own * value:.6g}")


def best_settings(scored: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    """Return the settings with the highest mean score over their seeds, the first of equals.

    >>> best_settings([({"lr": 0.1}, 0.9), ({"lr": 0.1}, 0.1), ({"lr": 0.2}, 0.6)])
    {'lr': 0.2}
    """
    scores = defaultdict(list)
    for settings, score in scored:
        scores[repr(settings)].append(score)
    return max((settings for settings, _ in scored), key=lambda settings: statistics.fmean(scores[repr(settings)]))


def evaluation_on_test_images(
    options: StudyOptions, info: DatasetInfo, data: str, rows: Sequence[Row]
) -> tuple[Evaluation, list[str]]:
    """Return the evaluation on the test images, with their digest, and notes; check before training that they exist.

    A note states if the test images are part of the training images. Methods that use labels are then rejected.
    """
    from snclr.data.labels import class_sizes
    from snclr.data.splits import open_splits
    from snclr.evaluation.scoring import match_labels

    evaluation = Evaluation(data=options.eval_data, test=options.test, k=options.k)
    train, test, _ = open_splits(evaluation.data or data, evaluation.test)
    labels, test_labels = match_labels(train, test)
    reason = _overlap(evaluation, data, test)
    supervised = [method for row in rows if METHODS[method := row.settings["method"]].needs_labels]
    if reason and supervised:
        raise UserError(
            f"the method {supervised[0]} would learn from the labels of the test images: {reason}."
            f" Give a dataset with train/ and test/ folders, or leave {supervised[0]} out."
        )
    notes = [_chance_note(info, test_labels)]
    if reason:
        notes.append(f"the test images were seen in pre-training, without their labels: {reason}")
    smallest, k = int(class_sizes(labels).min()), evaluation.k
    if k != "auto" and k > smallest:
        of_class = count(smallest, "training image")
        notes.append(f"k = {k} exceeds the {of_class} of the smallest class; --k auto chooses k as `snclr knn` does")
    return replace(evaluation, fingerprint=train.fingerprint() + test.fingerprint()), notes


def _chance_note(info: DatasetInfo, test_labels: Labels) -> str:
    """Return the chance levels, and how precise an accuracy on these test images can be."""
    from snclr.data.labels import class_sizes
    from snclr.train.health import PURITY_IN_TRAINING

    sizes = class_sizes(test_labels)
    n = int(sizes.sum())
    purity = "" if info.same_class is None else f"; neighbor purity: {PURITY_IN_TRAINING}; chance {info.same_class:.1%}"
    return (
        f"chance: {sizes.max() / n:.1%} top-1 (largest class). The standard error of one run's accuracy is at most"
        f" {50 / n**0.5:.1f} points ({count(n, 'test image')}){purity}"
    )


def _overlap(evaluation: Evaluation, data: str, test: ImageDataset) -> str:
    """Return why test images are trained on, or "". Images are compared: --eval-data may be a copy of --data."""
    import numpy as np

    from snclr.data.datasets.base import open_dataset
    from snclr.data.splits import holds_out_test, same_images
    from snclr.evaluation.trained_on import count_trained_on

    held_out = "the data has no test split" if holds_out_test(evaluation.data or data, evaluation.test) else ""
    if evaluation.data is None and evaluation.test is None:
        return held_out
    trained_on = open_dataset(data, split="train", download=True)
    # Some files may be equal by chance, e.g. empty ones, so that only a copy of all test images counts.
    seen = np.isin(*same_images(test, trained_on)).any() or count_trained_on(test, trained_on) == len(test)
    return (held_out or "they are among those of --data") if seen else ""
