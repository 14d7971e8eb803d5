"""The accuracy and confusions of each class for the newest kNN result of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from snclr.data.datasets.base import ImageDataset
from snclr.errors import UserError
from snclr.evaluation.baselines import FeatureClassifier
from snclr.evaluation.knn import knn
from snclr.evaluation.session import Session, open_inputs
from snclr.io.jsonl import is_finite_number
from snclr.reports.accuracies import wilson_interval

MAX_MATRIX = 20
"""Most classes of a confusion matrix; with more, only the most frequent confusions are listed."""
MAX_ROWS = 40
"""Most classes with a row of their own: the best and the worst ones."""


@dataclass(frozen=True)
class ClassTable:
    """Accuracy by class, and how often each class (row) was classified as each other (column)."""

    names: list[str]
    matrix: npt.NDArray[np.int64]
    protocol: str

    @property
    def rows(self) -> list[tuple[str, float, int, tuple[float, float]]]:
        """Name, accuracy, test images and 95 % interval of the classes with test images, best first.

        With many classes, these are the best and the worst.
        """
        shares, totals = np.diag(self.shares).tolist(), self.matrix.sum(axis=1).tolist()
        rows = [(*one, wilson_interval(*one[1:])) for one in zip(self.names, shares, totals, strict=True) if one[2]]
        rows.sort(key=lambda row: (-row[1], row[0]))
        return rows if len(rows) <= MAX_ROWS else rows[: MAX_ROWS // 2] + rows[-MAX_ROWS // 2 :]

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """The matrix with rows that sum to 1, or to 0 without test images."""
        return np.asarray(self.matrix / np.maximum(self.matrix.sum(axis=1, keepdims=True), 1))

    def confusions(self, count: int = 10) -> list[tuple[str, str, int, int]]:
        """Return the most frequent errors: true class, predicted class, images, images of the true class."""
        errors = self.matrix - np.diag(np.diag(self.matrix))
        order = np.argsort(-errors, axis=None, kind="stable")[:count]
        pairs = [divmod(int(position), len(self.names)) for position in order]
        totals = self.matrix.sum(axis=1)
        return [(self.names[i], self.names[j], int(errors[i, j]), int(totals[i])) for i, j in pairs if errors[i, j]]


def rename_classes(dataset: ImageDataset, names: Sequence[str] | None) -> None:
    """Replace the class names of a dataset in place; do nothing for None or a dataset without labels."""
    if names is None or dataset.labels is None:
        return
    classes = len(dataset.class_names())
    if len(names) != classes:
        raise UserError(f"--class-names has {len(names):,} names, but {dataset.name} has {classes:,} classes")
    dataset.classes = list(names)


def classify_again(
    session: Session, results: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> ClassTable | None:
    """Repeat the newest kNN result, from cached features if there are any; None if the run has no kNN result.

    Raise UserError if it cannot be repeated, or if the accuracy is not the recorded one.
    """
    records = [record for record in results if record["kind"] == "knn"]
    if not records or not is_finite_number(top1 := records[-1]["numbers"].get("top1")):
        return None
    settings = records[-1].get("settings")
    if not isinstance(settings, dict) or not {"data", "test", "seed", "k", "temperature"} <= settings.keys():
        raise UserError("the newest kNN result does not record its settings. Run snclr knn again")
    inputs = open_inputs(session, settings["data"], settings["test"], seed=settings["seed"])
    train, test = inputs.features(session)
    used = {name: settings[name] for name in ("k", "temperature")}
    score = FeatureClassifier("knn", knn, session, inputs, used)(train, test)
    if abs(score.top1 - top1) > 1e-6:
        raise UserError(
            f"kNN now gives {score.top1:.2%} instead of the recorded {top1:.2%}: images or weights have changed. "
            "Run snclr knn again"
        )
    rename_classes(inputs.train, names)
    assert test.labels is not None
    truth, predictions = test.labels[test.labels >= 0].numpy(), score.predictions.numpy()
    count = int(max(truth.max(), predictions.max())) + 1
    classes = inputs.train.classes or [str(number) for number in range(count)]
    matrix = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(matrix, (truth, predictions), 1)
    on = f"{len(truth):,} test images ({inputs.description})"
    return ClassTable(classes, matrix, f"kNN with k = {score.facts['k']} on {on}")
