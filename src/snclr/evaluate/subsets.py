"""Which training images keep their label: a class-balanced share by a seed, or a published list of file names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from snclr.data.order import Ids, epoch_order
from snclr.data.sources import Labels, Source
from snclr.errors import UserError

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class LabelledSubset:
    """Chosen images of a source: sorted indices (n,), their names, and how they were chosen."""

    index: Ids
    names: list[str]
    tag: str
    """Short, for file names: 1pct, 10pct, or the list's own name."""
    words: str
    share: Fraction
    """Of the labelled images of the source; as asked for, where a share was."""

    @property
    def text(self) -> str:
        """The list as written to a file, a name a line."""
        return "".join(f"{name}\n" for name in self.names)

    @property
    def sha256(self) -> str:
        """Of the list as written."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def choose_subset(source: Source, labels: Labels, asked: str | Path, *, seed: int) -> LabelledSubset:
    """The images of `asked`: a share such as 1% or 0.5%, or a file with a name a line. -1 in labels (n,) is unknown."""
    known = np.flatnonzero(labels >= 0)
    match = _PERCENT.fullmatch(str(asked).strip())
    if match is None:
        index = read_list(Path(asked), source)
        if unlabelled := [source.key(i) for i in index.tolist() if labels[i] < 0]:
            raise UserError(f"{len(unlabelled)} images of {asked} have no label, e.g. {', '.join(unlabelled[:3])}")
        tag = re.sub(r"[^\w.-]", "_", Path(asked).stem)[:40]
        share = Fraction(len(index), max(1, len(known)))
        words = f"the {len(index):,} images listed in {Path(asked).name}"
        return LabelledSubset(index, _names(source, index), tag, words, share)
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise UserError(f"labels {asked} is not a share of the images; give more than 0% and at most 100%, or a list")
    index = known[balanced_subset(labels[known], share, seed)]
    words = f"{match[1]}% of the labels ({len(index):,} images, class-balanced, seed {seed})"
    return LabelledSubset(index, _names(source, index), f"{match[1]}pct", words, share)


def balanced_subset(labels: Labels, share: Fraction, seed: int) -> Ids:
    """Sorted indices of ⌊share · n⌋ of n images, equally many of each class (±1), and at least one of each.

    A class with fewer images than its part gives all it has, and the others more. With one seed, the images of a
    smaller share are among those of a larger one.

    >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    >>> labels[balanced_subset(labels, Fraction(1, 2), seed=0)].tolist()
    [0, 0, 1, 1]
    """
    classes, sizes = np.unique(labels, return_counts=True)
    count = max(len(classes), int(share * len(labels)))
    parts = _parts(sizes, count, seed)
    order = epoch_order(len(labels), seed, epoch=0)
    by_class = order[np.argsort(labels[order], kind="stable")]  # class after class, each in the seed's order
    turn = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(by_class[turn < np.repeat(parts, sizes)])


def _parts(sizes: Ids, count: int, seed: int) -> Ids:
    """How many of each class (C,), summing to count: as equal as the sizes allow, the odd ones by the seed."""
    assert len(sizes) <= count <= sizes.sum()
    parts = np.zeros_like(sizes)
    turns = epoch_order(len(sizes), seed, epoch=1)
    while (rest := count - int(parts.sum())) > 0:
        open_classes = turns[parts[turns] < sizes[turns]]
        each = rest // len(open_classes)
        if each == 0:
            parts[open_classes[:rest]] += 1
        else:
            parts[open_classes] = np.minimum(parts[open_classes] + each, sizes[open_classes])
    return parts


def read_list(path: Path, source: Source) -> Ids:
    """Sorted indices of the images a text file names, one a line, by file name (n01440764_10026.JPEG) or longer path.

    A name with folders must agree with the image's as far as both go. Empty lines and those that start with # are
    passed over.
    """
    if not path.is_file():
        raise UserError(
            f"labels {str(path)!r} is neither a share such as 1% or 10% nor a file with the name of an image a line"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as a text list of file names: {error}") from error
    wanted = list(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.startswith("#")))
    if not wanted:
        raise UserError(f"{path} names no images; it needs a file name a line, such as n01440764_10026.JPEG")
    by_name: dict[str, list[tuple[str, int]]] = {}
    for index in range(len(source)):
        name = _line(source.key(index))
        by_name.setdefault(name.rpartition("/")[2], []).append((name, index))
    matches = [_matching(name, by_name.get(name.rpartition("/")[2], [])) for name in wanted]
    pairs = list(zip(wanted, matches, strict=True))
    if unknown := [name for name, found in pairs if not found]:
        raise UserError(
            f"{len(unknown)} of the {len(wanted)} names in {path} are not among the training images of {source.name}: "
            f"{_some(unknown)}; an image there is called {source.key(0)}"
        )
    if unclear := [name for name, found in pairs if len(found) > 1]:
        raise UserError(
            f"{len(unclear)} names in {path} fit several images of {source.name}: {_some(unclear)}; write them with "
            "their folders"
        )
    return np.unique(np.array([found[0] for found in matches], dtype=np.int64))


def _matching(name: str, candidates: Sequence[tuple[str, int]]) -> list[int]:
    """Indices of the candidates, all of one file name, that agree with a name as far as both go; an equal one wins."""
    name = name.removeprefix("./")
    if equal := [index for key, index in candidates if key == name]:
        return equal
    return [index for key, index in candidates if f"/{key}".endswith(f"/{name}") or f"/{name}".endswith(f"/{key}")]


def _names(source: Source, index: Ids) -> list[str]:
    return [_line(source.key(i)) for i in index.tolist()]


def _line(key: str) -> str:
    """A key in one line: file names may hold line breaks."""
    return key.replace("\r", "\\r").replace("\n", "\\n")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
