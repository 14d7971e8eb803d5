"""Results of embed, search, neighbors and explain; free of torch, so that the api imports them at no cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snclr.runtime.results import Result

if TYPE_CHECKING:
    from snclr.data.loader import Skip

FORMATS = (".npy", ".npz", ".parquet")
"""Suffixes of the files that `embed` writes."""
MAX_NEIGHBORS = 100
"""Most neighbors per image in a figure; `search` and `embed` have no such limit."""


@dataclass(frozen=True)
class Neighbor:
    """A gallery image near a query."""

    key: str
    index: int
    """Index in the gallery's dataset."""
    cosine: float
    w: float
    """Positiveness (Eq. 4), as in training for a run of SNCLR; otherwise the largest of a row is 1."""
    label: str | None = None
    same_class: bool | None = None
    """None if either label is unknown."""
    path: str | None = None
    """The image file, if the image has a file of its own."""


@dataclass(frozen=True)
class NeighborRow:
    """A query image and its neighbors, ranked by w; `index` is its index in the query dataset."""

    key: str
    index: int
    label: str | None
    neighbors: list[Neighbor]


@dataclass(frozen=True)
class EmbedResult:
    """A written embeddings file; `metadata` is also stored in the file."""

    file: str
    keys_file: str | None
    """The JSON file with the row names, written beside a .npy file."""
    images: int
    metadata: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, the metadata at the top level."""
        return {"file": self.file, "keys_file": self.keys_file, "images": self.images, **self.metadata}


@dataclass(frozen=True)
class SearchResult(Result):
    """The most similar images of a collection to each query image."""

    queries: list[NeighborRow]
    k: int
    collection: str
    images: int
    """Readable images in the collection."""
    method: str
    """How the collection was searched."""
    recall: float | None
    """Measured recall of an approximate search; None if the search is exact."""
    skipped: list[Skip]
    figure: str | None


@dataclass(frozen=True)
class NeighborsResult(Result):
    """Images with their neighbors, and how often neighbors share the image's class."""

    rows: list[NeighborRow]
    """The rows of the figure."""
    neighbor_purity: list[float | None]
    """For each rank, the share of all queries whose neighbor has their class; None without labels."""
    chance: float | None
    """The neighbor purity of random neighbors; None without labels."""
    purity_description: str
    """What is compared with what."""
    queries: int
    weights: str | None
    """How w is computed; None if the run's loss has no w."""
    protocol: str
    skipped: list[Skip]
    figure: str
    table: str
    """The JSON file with the rows."""


@dataclass(frozen=True)
class ExplainedTerm:
    """One term of Eq. 2 with the name of its image."""

    i: int
    """0 for y2, then 1..K by cosine."""
    key: str
    index: int | None
    """Index in the gallery's dataset; None for y2."""
    label: str | None
    cosine: float
    """Cosine by which the neighbor was selected (Eq. 3): y2·NN_i, or that of the target encoder's features."""
    prediction: float
    """z1·NN_i, which the loss compares."""
    w: float
    """Positiveness (Eq. 4); 1 for y2."""
    p: float
    """exp(z1·NN_i/τ) over the denominator; 0 if it does not enter."""
    term: float
    """w_i p_i (form "inside") or w_i (−log p_i) (form "outside")."""
    share: float
    """The term divided by the sum of all terms."""


@dataclass(frozen=True)
class Explanation(Result):
    """The loss of one image in one direction, term by term: y2 first, then the neighbors by cosine."""

    image: str
    view: str
    candidates: str
    loss: float
    form: str
    sides: str
    tau: float
    gamma: float | str
    denominator: str
    neighbors: int
    terms: list[ExplainedTerm]
    note: str | None
    """Why neighbors are named by number only, if they are."""
    figure: str | None = None
