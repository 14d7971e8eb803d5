"""The accuracies of a run by test set, with their binomial errors."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snclr.evaluation.results import TITLES
from snclr.io.jsonl import is_finite_number

_TRAILING_SLASH = re.compile(r"(?<=\w)/(?=,|$)")  # photos and photos/ are one folder
_LONG_CLAUSE = 160  # characters


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
    k: str | None = None
    """For kNN: the number of neighbors that voted, and why if another one was requested."""
    warnings: tuple[str, ...] = ()
    """Why the number may be misleading, such as test images that were trained on."""

    @property
    def title(self) -> str:
        """The kind of evaluation, as shown."""
        return TITLES.get(self.kind, self.kind)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy."""
        return None if self.n is None else wilson_interval(self.top1, self.n)


def eval_set_of(record: Mapping[str, Any]) -> EvalSet:
    """Return the test set of a result.

    >>> eval_set_of({"data": "train a, test b/", "n": 120})
    EvalSet(name='train a, test b', n=120)
    """
    n = record.get("n")
    name = _TRAILING_SLASH.sub("", str(record.get("data") or "test set not recorded"))
    return EvalSet(name, n if type(n) is int and n > 0 else None)


def accuracy_of(record: Mapping[str, Any]) -> Accuracy | None:
    """Return the accuracy of a result; None for a result without a top-1 accuracy."""
    top1 = record["numbers"].get("top1")
    if not is_finite_number(top1) or not 0 <= top1 <= 1:
        return None
    n, error, chance = eval_set_of(record).n, record.get("standard_error"), record.get("chance")
    if not is_finite_number(error):
        error = None if n is None else math.sqrt(top1 * (1 - top1) / n)
    baselines = record.get("baselines")
    given = baselines.items() if isinstance(baselines, dict) else ()
    values: dict[str, Any] = {str(name): b.get("top1") if isinstance(b, dict) else b for name, b in given}
    warnings = record.get("warnings")
    return Accuracy(
        str(record["kind"]), top1, n, error, chance if is_finite_number(chance) else None,
        {name: value for name, value in values.items() if is_finite_number(value) and 0 <= value <= 1},
        used_k(record), tuple(map(str, warnings)) if isinstance(warnings, list) else (),
    )  # fmt: skip


def used_k(record: Mapping[str, Any]) -> str | None:
    """Return the k of a kNN result as text, with the requested one if that is another; None for other results.

    >>> used_k({"kind": "knn", "k": 80, "settings": {"k": 200}}), used_k({"kind": "knn", "k": 80})
    ('80 (200 requested)', '80')
    """
    used, settings = record.get("k"), record.get("settings")
    if record["kind"] != "knn" or not is_finite_number(used):
        return None
    requested = settings.get("k", used) if isinstance(settings, dict) else used
    if requested == used:
        return str(used)
    return f"{used} (auto)" if requested == "auto" else f"{used} ({requested} requested)"


def warnings_of(accuracies: Sequence[Accuracy]) -> list[tuple[str, str]]:
    """Return every warning of some accuracies once, with the titles of those it belongs to.

    >>> one = Accuracy("knn", 0.5, 10, None, None, {}, warnings=("w",))
    >>> warnings_of([one, one])
    [('kNN, kNN', 'w')]
    """
    titles: dict[str, list[str]] = {}
    for accuracy in accuracies:
        for warning in accuracy.warnings:
            titles.setdefault(warning, []).append(accuracy.title)
    return [(", ".join(of), warning) for warning, of in titles.items()]


def by_test_set(results: Sequence[Mapping[str, Any]]) -> dict[EvalSet, list[Accuracy]]:
    """Return the newest accuracy of each kind for every test set; the set of the newest result comes first."""
    newest: dict[EvalSet, dict[str, Accuracy]] = {}
    for record in reversed(results):
        accuracy = accuracy_of(record)
        if accuracy is not None:
            newest.setdefault(eval_set_of(record), {}).setdefault(accuracy.kind, accuracy)
    order = list(TITLES)
    return {
        tested: sorted(kinds.values(), key=lambda a: order.index(a.kind) if a.kind in order else len(order))
        for tested, kinds in newest.items()
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share of n; unlike ± 1.96 standard errors it is right near 0 and 1.

    >>> [round(end, 3) for end in wilson_interval(0.5, 100)], [round(end, 3) for end in wilson_interval(1.0, 10)]
    ([0.404, 0.596], [0.722, 1.0])
    """
    from scipy.stats import binomtest

    interval = binomtest(round(share * n), n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def clauses(protocol: str) -> list[tuple[str, str]]:
    """Return the parts of a protocol, which are separated by semicolons: each as a text and its details.

    A long part has its details after the first colon.

    >>> clauses("kNN: k = 20; 480 training and 120 test images")
    [('kNN: k = 20', ''), ('480 training and 120 test images', '')]
    """
    found = []
    for part in filter(None, protocol.split("; ")):
        title, _, details = part.partition(": ")
        found.append((title, details) if len(part) > _LONG_CLAUSE and details else (part, ""))
    return found
