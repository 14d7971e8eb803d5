"""Class labels: number class names, and renumber labels by another list of classes."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]


def sort_classes(names: Iterable[str]) -> list[str]:
    """Sort class names, numerically if all are numbers.

    >>> sort_classes(["10", "9"]), sort_classes(["10", "9", "x"])
    (['9', '10'], ['10', '9', 'x'])
    """
    names = set(names)
    if not all(name.isascii() and name.isdigit() for name in names):
        return sorted(names)
    # By length, then by digits: the numerical order without int(), which refuses numbers of 5,000 digits.
    return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))


def encode_labels(names: Iterable[str | None], classes: Sequence[str]) -> Labels:
    """Return the index of each name in `classes` (n,); -1 for None and names that are not in it."""
    number: dict[str | None, int] = {name: index for index, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in names], dtype=np.int64)


def number_labels(
    names: Sequence[str | None], classes: Sequence[str] | None = None
) -> tuple[Labels | None, list[str] | None]:
    """Number label names by `classes` (default: `sort_classes`); (None, None) if all names are missing."""
    known = {name for name in names if name is not None}
    if not known:
        return None, None
    classes = list(classes or sort_classes(known))
    return encode_labels(names, classes), classes


def class_sizes(labels: Labels) -> npt.NDArray[np.int64]:
    """Return the number of images of each class that has any; -1 is no class."""
    return np.unique(labels[labels >= 0], return_counts=True)[1]


def chance_levels(labels: Labels | None) -> dict[str, float]:
    """Return the chance levels of the metrics of training by name; {} without labels.

    Random neighbors have a purity of the sum of squared class shares. The accuracy is that of the largest class.

    >>> chance_levels(np.array([0, 0, 0, 1, -1]))
    {'neighbor_purity': 0.625, 'queue_knn': 0.75}
    """
    sizes = np.empty(0, np.int64) if labels is None else class_sizes(labels)
    shares = sizes / max(sizes.sum(), 1)
    return {"neighbor_purity": float((shares**2).sum()), "queue_knn": float(shares.max())} if len(sizes) else {}


def renumber_labels(labels: Labels, classes: Sequence[str], target: Sequence[str]) -> Labels:
    """Renumber labels of `classes` by the list `target`; -1 for classes that are not in it.

    >>> renumber_labels(np.array([0, 1, -1]), ["cat", "dog"], ["ant", "dog"]).tolist()
    [-1, 1, -1]
    """
    table: Labels = encode_labels([*classes, None], target)  # last entry: label -1
    return np.take(table, labels)
