"""The accuracies of a run by test set, with their binomial errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snclr.io.jsonl import is_finite_number

KINDS = {
    "knn": "kNN",
    "linear-cached": "linear probe",
    "linear-paper": "linear probe (paper)",
    "finetune": "fine-tuning",
}
# The end of a protocol, written by `snclr.evaluation.scoring.describe_sets`.
_SETS = re.compile(
    r"[\d,]+ training and (?P<n>[\d,]+) test images?, [\d,]+ classes(?:, [\d,]+ images? without a label left out)?"
    r"(?: \((?P<data>.*)\))?(?:; [\d,]+ (?:test )?images? [^;]*)?$"
)


@dataclass(frozen=True)
class EvalSet:
    """The images an accuracy was measured on: their description, and their number if known."""

    name: str
    n: int | None


@dataclass(frozen=True)
class Accuracy:
    """A top-1 accuracy with its number of test images and its standard error, if known."""

    kind: str
    top1: float
    n: int | None
    standard_error: float | None
    chance: float | None
    baselines: dict[str, float]
    """Top-1 of other features on the same test set, by name."""

    @property
    def title(self) -> str:
        """The kind of evaluation in words."""
        return KINDS.get(self.kind, self.kind)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy."""
        return None if self.n is None else wilson_interval(self.top1, self.n)


def eval_set_of(record: Mapping[str, Any]) -> EvalSet:
    """Return the test set of a result, from its fields and its protocol.

    >>> eval_set_of({"protocol": "kNN: k = 20; 480 training and 120 test images, 5 classes (train a, test b)"})
    EvalSet(name='train a, test b', n=120)
    """
    found = _SETS.search(str(record.get("protocol", "")))
    n = record.get("n")
    if type(n) is not int or n < 1:
        n = int(found["n"].replace(",", "")) if found else None
    return EvalSet((found["data"] if found else None) or "test set not recorded", n or None)


def accuracy_of(record: Mapping[str, Any]) -> Accuracy | None:
    """Return the accuracy of a result; None for a result without a top-1 accuracy."""
    top1 = record["numbers"].get("top1")
    if not is_finite_number(top1) or not 0 <= top1 <= 1:
        return None
    n, error, chance = eval_set_of(record).n, record.get("standard_error"), record.get("chance")
    if not is_finite_number(error):
        error = None if n is None else math.sqrt(top1 * (1 - top1) / n)
    baselines = record.get("baselines")
    return Accuracy(
        str(record["kind"]), top1, n, error, chance if is_finite_number(chance) else None,
        {str(name): value for name, value in baselines.items() if is_finite_number(value) and 0 <= value <= 1}
        if isinstance(baselines, dict) else {},
    )  # fmt: skip


def by_test_set(results: Sequence[Mapping[str, Any]]) -> dict[EvalSet, list[Accuracy]]:
    """Return the newest accuracy of each kind for every test set; the set of the newest result comes first."""
    newest: dict[EvalSet, dict[str, Accuracy]] = {}
    for record in reversed(results):
        accuracy = accuracy_of(record)
        if accuracy is not None:
            newest.setdefault(eval_set_of(record), {}).setdefault(accuracy.kind, accuracy)
    order = list(KINDS)
    return {
        tested: sorted(kinds.values(), key=lambda a: order.index(a.kind) if a.kind in order else len(order))
        for tested, kinds in newest.items()
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share of n; unlike ± 1.96 standard errors it is right near 0 and 1.

    >>> [round(end, 3) for end in wilson_interval(0.5, 100)], [round(end, 3) for end in wilson_interval(1.0, 10)]
    ([0.404, 0.596], [0.722, 1.0])
    """
    z2 = 1.959964**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * share * (1 - share) / n + z2 * z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)
