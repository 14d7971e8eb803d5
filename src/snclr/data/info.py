"""Name, size and classes of a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snclr.errors import UserError

_SPLIT_NAMES = ("train", "training", "val", "validation", "test")


@dataclass(frozen=True)
class DatasetInfo:
    """Name, size, digest and classes of the training images."""

    name: str
    images: int
    fingerprint: str
    classes: int | None
    chance: Mapping[str, float]
    """The chance levels of the metrics of training by name; {} without labels."""

    @property
    def same_class(self) -> float | None:
        """Probability that two random labeled images have the same class."""
        return self.chance.get("neighbor_purity")


def inspect_dataset(data: str) -> DatasetInfo:
    """Open the training images and count them and their classes."""
    from snclr.data.datasets.base import open_dataset
    from snclr.data.labels import chance_levels, class_sizes

    if not data:
        raise UserError("data is missing. Give the images to train on.")
    dataset = open_dataset(data, split="train", download=True)
    classes = 0 if dataset.labels is None else len(class_sizes(dataset.labels))
    chance = chance_levels(dataset.labels)
    return DatasetInfo(dataset_name(data), len(dataset), dataset.fingerprint(), classes or None, chance)


def dataset_name(data: str) -> str:
    """Return the name of a dataset for tables: the last part of its path, with the parent of a split.

    >>> dataset_name("/home/me/flowers/"), dataset_name("/home/me/flowers/train"), dataset_name("demo")
    ('flowers', 'flowers/train', 'demo')
    """
    path = Path(data)
    return f"{path.parent.name}/{path.name}".lstrip("/") if path.name in _SPLIT_NAMES else path.name
