"""Choose the labeled training images: a class-balanced share drawn from a seed, or a list of file names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from snclr.data.datasets.base import ImageDataset, Labels
from snclr.data.datasets.folder import read_list_file
from snclr.data.sampler import Ids, epoch_order
from snclr.errors import UserError, count, similar_path
from snclr.io.hashing import sha256_text

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class LabeledSubset:
    """Chosen images of a dataset: sorted indices (n,), and how they were chosen."""

    index: Ids
    text: str
    """The list as written to a file: one name per line."""
    tag: str
    """Short name for files: 1pct, 10pct, or the name of the list."""
    description: str
    share: Fraction
    """Share of the dataset's labeled images; the given one, if a share was given."""

    @property
    def sha256(self) -> str:
        """SHA-256 of `text`."""
        return sha256_text(self.text)


def choose_subset(dataset: ImageDataset, labels: Labels, given: str | Path, *, seed: int) -> LabeledSubset:
    """Choose images by a share such as 1% or 0.5%, or by a file with one name per line.

    `labels` (n,) has -1 for unlabeled images.
    """
    known = np.flatnonzero(labels >= 0)
    share = read_share(given)
    if share is None:
        index = read_list(Path(given), dataset)
        if unlabeled := [dataset.key(i) for i in index.tolist() if labels[i] < 0]:
            raise UserError(
                f"{given} lists {count(len(unlabeled), 'image')} without a label, e.g. {', '.join(unlabeled[:3])}"
            )
        tag = re.sub(r"[^\w.-]", "_", Path(given).stem)[:40]
        share = Fraction(len(index), max(1, len(known)))
        description = f"{count(len(index), 'image')} listed in {Path(given).name}"
    else:
        percent = str(given).strip().rstrip("%").rstrip()
        tag = f"{percent}pct"
        index = known[balanced_subset(labels[known], share, seed)]
        description = f"{percent}% of the labels ({count(len(index), 'image')}, class-balanced, seed {seed})"
    text = "".join(f"{_line(dataset.key(i))}\n" for i in index.tolist())
    return LabeledSubset(index, text, tag, description, share)


def read_share(given: str | Path) -> Fraction | None:
    """Return the share that a percentage states, or None for a file. Raise UserError for anything else.

    >>> read_share("0.5%"), read_share(__file__)
    (Fraction(1, 200), None)
    """
    match = _PERCENT.fullmatch(str(given).strip())
    if match is None:
        if Path(given).is_file():
            return None
        number = _PERCENT.fullmatch(f"{str(given).strip()}%")
        percent = number and float(number[1]) * (100 if float(number[1]) < 1 else 1)  # 0.1 is a fraction
        hint = similar_path(Path(given)) if percent is None else f" (did you mean '{percent:g}%'?)"
        raise UserError(
            f"--labels {str(given)!r} is neither a share such as 1% or 10% nor a file with one image name per"
            f" line{hint}"
        )
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise UserError(f"--labels {given} is not a share of the images; give more than 0% and at most 100%")
    return share


def balanced_subset(labels: Labels, share: Fraction, seed: int) -> Ids:
    """Return sorted indices of ⌊share · n⌋ of n images, equally many per class (±1) and at least one.

    A class with too few images contributes all of them, and the other classes more. With the same seed, a smaller share
    is a subset of a larger one.

    >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    >>> labels[balanced_subset(labels, Fraction(1, 2), seed=0)].tolist()
    [0, 0, 1, 1]
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    chosen = max(len(classes), int(share * len(labels)))
    by_class, turn = sort_by_class(labels, epoch_order(len(labels), seed, epoch=0))
    class_order = np.argsort(epoch_order(len(classes), seed, epoch=1))  # the classes take turns in the seed's order
    return np.sort(by_class[np.lexsort((class_order[numbers[by_class]], turn))[:chosen]])


def sort_by_class(labels: Labels, order: Ids) -> tuple[Ids, Ids]:
    """Sort a permutation (n,) of images by class, and return it with the position (n,) of each within its class.

    >>> sort_by_class(np.array([1, 0, 1]), np.array([2, 1, 0]))
    (array([1, 2, 0]), array([0, 0, 1]))
    """
    _, sizes = np.unique(labels, return_counts=True)
    position = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.argsort(labels[order], kind="stable")], position


def read_list(path: Path, dataset: ImageDataset) -> Ids:
    """Return the sorted indices of the images named in a text file, one per line.

    A name is a file name (n01440764_10026.JPEG) or a path that ends like the image's path. Empty lines and lines that
    start with # are ignored.
    """
    wanted = list(dict.fromkeys(line.strip() for _, line in read_list_file(path, str(path))))
    if not wanted:
        raise UserError(f"{path} names no images; give one file name per line, such as n01440764_10026.JPEG")
    by_name: dict[str, list[tuple[str, int]]] = {}
    for index in range(len(dataset)):
        key = _line(dataset.key(index))
        by_name.setdefault(key.rpartition("/")[2], []).append((key, index))
    matches = {name: _matching(name.removeprefix("./"), by_name.get(name.rpartition("/")[2], [])) for name in wanted}
    if unknown := [name for name, indices in matches.items() if not indices]:
        raise UserError(
            f"{len(unknown)} of the {len(wanted)} names in {path} are not among the training images of {dataset.name}: "
            f"{', '.join(unknown[:4])}; an image there is called {dataset.key(0)}"
        )
    if ambiguous := [name for name, indices in matches.items() if len(indices) > 1]:
        raise UserError(
            f"{len(ambiguous)} names in {path} match several images of {dataset.name}: {', '.join(ambiguous[:4])}; "
            "write them with their folders"
        )
    return np.unique(np.array([indices[0] for indices in matches.values()], dtype=np.int64))


def _matching(name: str, candidates: Sequence[tuple[str, int]]) -> list[int]:
    """Return the candidates whose path ends like `name`, or the other way around; an equal path wins."""
    if equal := [index for key, index in candidates if key == name]:
        return equal
    return [index for key, index in candidates if f"/{key}".endswith(f"/{name}") or f"/{name}".endswith(f"/{key}")]


def _line(key: str) -> str:
    """Escape the line breaks of a file name."""
    return key.replace("\r", "\\r").replace("\n", "\\n")
