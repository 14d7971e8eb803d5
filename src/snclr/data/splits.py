"""A labelled set in two parts, for evaluation: the set's own parts where it has them, else a seeded hold-out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from snclr.data.builtin import BUILTIN
from snclr.data.decode import Picture
from snclr.data.huggingface import has_test_split, names_huggingface
from snclr.data.order import Ids, epoch_order
from snclr.data.sources import ArraySource, Labels, Source, is_remote, open_source, order_of
from snclr.errors import UserError

HELD_OUT = 0.2
Index = npt.NDArray[np.int64]


@dataclass
class Subset:
    """Some images of a source, under the source's own keys."""

    source: Source
    index: Index = field(repr=False)

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.classes = self.source.classes
        self.remote = is_remote(self.source)
        self.labels: Labels | None = None if self.source.labels is None else self.source.labels[self.index]

    def __len__(self) -> int:
        return len(self.index)

    def load(self, index: int, min_side: int | None = None) -> Picture:
        """Return one image, uint8 (H, W, 3)."""
        return self.source.load(int(self.index[index]), min_side)

    def key(self, index: int) -> str:
        """Return its key in the source."""
        return self.source.key(int(self.index[index]))

    def epoch_order(self, seed: int, epoch: int) -> Ids:
        """Return the source's own order without the images left out, where it has one; else that of any set."""
        order = order_of(self.source)
        if order is None:
            return epoch_order(len(self), seed, epoch)
        place = np.full(len(self.source), -1, dtype=np.int64)
        place[self.index] = np.arange(len(self))
        chosen: Ids = place[order(seed, epoch)]
        return chosen[chosen >= 0]

    def fingerprint(self) -> str:
        """Return the source's digest with the chosen numbers."""
        import hashlib

        return hashlib.sha256((self.source.fingerprint() + self.index.tobytes().hex()).encode()).hexdigest()


def take(source: Source, index: Index) -> Source:
    """Some images of a source; images in memory stay in memory."""
    if isinstance(source, ArraySource):
        labels = None if source.labels is None else source.labels[index]
        return ArraySource(source.name, source.images[index], labels, source.classes, prefix=source.prefix)
    return Subset(source, index)


def hold_out(labels: Labels, share: float, seed: int) -> tuple[Index, Index]:
    """Split (n,) labelled images into two sorted parts, the second with `share` of each class (at least one).

    >>> kept, held = hold_out(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0)
    >>> len(kept), len(held)
    (6, 2)
    """
    generator = np.random.default_rng([seed, len(labels)])
    held = [
        generator.permutation(np.flatnonzero(labels == label))[: max(1, round(share * np.sum(labels == label)))]
        for label in np.unique(labels[labels >= 0])
        if np.sum(labels == label) > 1
    ]
    second = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    first = np.setdiff1d(np.flatnonzero(labels >= 0), second)
    return first, second


def open_splits(data: str, test: str | None = None, *, seed: int = 0) -> tuple[Source, Source, str]:
    """The training and test part of a labelled set, and how they came about in words.

    `test` names the test set; else it is the set's own (of a built-in or Hugging Face set, or a sub-folder test or val
    beside train, of files or shards), or a fifth of each class, held out by the seed.
    """
    if test is not None:
        return _open(data, "train"), _open(test, "test"), f"train {data}, test {test}"
    if _has_test_part(data):
        return _open(data, "train"), _open(data, "test"), f"{data}, its own train and test split"
    whole = _open(data, "train")
    if whole.labels is None:
        return whole, whole, data  # the evaluation says what is missing
    kept, held = hold_out(whole.labels, HELD_OUT, seed)
    if len(kept) and not len(held):
        raise UserError(
            f"no class of {data} has two images, so none can be held out for the test; give the test images by --test"
        )
    words = f"{data}, {HELD_OUT:.0%} of each class held out for the test (seed {seed})"
    return take(whole, kept), take(whole, held), words


def _has_test_part(data: str) -> bool:
    """Whether a name, a folder or a hub's data set has a part of its own for testing."""
    if names_huggingface(data):
        return has_test_split(data)
    if data.lower() in BUILTIN:
        return "test" in BUILTIN[data.lower()].splits
    folder = Path(data).expanduser()
    return data.lower() == "demo" or (
        (folder / "train").is_dir() and any((folder / name).is_dir() for name in ("test", "val"))
    )


def _open(data: str, split: str) -> Source:
    """The split of a set that has it; a plain folder or list is its own."""
    return open_source(data, split=split if _has_test_part(data) else "train", download=True)
