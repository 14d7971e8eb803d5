"""The typed results of evaluations, free of torch, and the results.jsonl of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError
from snclr.io.jsonl import append_jsonl, read_jsonl
from snclr.runtime.results import Result

if TYPE_CHECKING:
    from typing_extensions import Self

    from snclr.data.loader import Skip

TITLES = {
    "knn": "kNN",
    "linear-cached": "linear probe",
    "linear-paper": "linear probe (paper)",
    "linear-mae": "linear probe (MAE's)",
    "finetune": "fine-tuning",
    "finetune-scratch": "training from scratch",
}
"""The kinds of accuracies, as shown; a few-shot result has its kind as title."""
FORMATS = (".npy", ".npz", ".parquet")
"""Suffixes of the files that `embed` writes."""
MAX_NEIGHBORS = 100
"""Most neighbors per image in a figure; `search` and `embed` have no such limit."""
MANY_DUPLICATES = 0.2
"""Share of near-duplicates above which the encoder is more likely the reason than the images."""


@dataclass(frozen=True)
class Baseline:
    """Accuracy of other features on the same images, with the same classifier; a linear one for fine-tuning."""

    top1: float
    top5: float | None
    standard_error: float
    note: str | None = None
    """How it differs from the run."""


@dataclass(frozen=True)
class AccuracyResult:
    """One accuracy measurement as recorded in results.jsonl; accuracies are in [0, 1]."""

    kind: str
    time: str
    """When the result was recorded (ISO 8601, UTC)."""
    top1: float
    top5: float | None
    """None with five classes or fewer."""
    n: int
    """Labeled test images."""
    standard_error: float
    """Binomial standard error of `top1`."""
    classes: int
    """Classes of the test images."""
    chance: float
    """Share of the largest class of the test images: the accuracy of always predicting it. At least 1/classes."""
    baselines: dict[str, Baseline]
    """Accuracies of the untrained encoder and of raw pixels; empty if they were not computed."""
    warnings: list[str]
    protocol: str
    data: str
    """The training and the test images."""
    unlabeled: int
    """Training and test images without a label, which were left out."""
    skipped: int | Sequence[dict[str, Any]]
    """Images that could not be read: their number, after fine-tuning also their names and the reasons."""
    precision: str = field(default="32", kw_only=True)
    """Precision of the frozen encoder; a record has it only if it is not 32."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Build the result from a record in results.jsonl."""
        values = {**record, **record["numbers"]}
        values["baselines"] = {name: Baseline(**baseline) for name, baseline in record["baselines"].items()}
        del values["numbers"]
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the record in results.jsonl."""
        values = asdict(self)
        numbers = {name: values.pop(name) for name in ("top1", "top5")}
        if values["precision"] == "32":
            del values["precision"]
        return {"kind": values.pop("kind"), "time": values.pop("time"), "numbers": numbers, **values}


@dataclass(frozen=True)
class KnnResult(AccuracyResult):
    """Accuracy of a weighted k-nearest-neighbor classifier."""

    k: int
    """Neighbors that voted."""
    settings: dict[str, Any]
    """What was given: data and test (None: those of the run), seed, k and temperature."""


@dataclass(frozen=True)
class FewShotResult(AccuracyResult):
    """Accuracy of the nearest labeled image, with a few labels per class: the mean over draws of the labeled images.

    `standard_error` is that over the draws.
    """

    labels_per_class: int
    draws: int
    by_draw: list[float]
    """Top-1 accuracy of each draw."""


@dataclass(frozen=True)
class LinearResult(AccuracyResult):
    """Accuracy of a linear classifier on the frozen encoder."""

    learning_rate: float


@dataclass(frozen=True)
class FinetuneResult(AccuracyResult):
    """Accuracy of the encoder fine-tuned on a subset of the labels."""

    settings: dict[str, Any]
    labels: str
    """The share or the list file that was given."""
    list: str
    """File in the run directory with the names of the labeled images."""
    list_sha256: str
    model_sha256: str


@dataclass(frozen=True)
class DetectResult(Result):
    """Average precision of a detector as recorded in results.jsonl: values in [0, 1], None if there are no objects."""

    kind: str
    time: str
    """When the result was recorded (ISO 8601, UTC)."""
    numbers: dict[str, float | None]
    """AP, AP50 and AP75 of boxes (_bb) and masks (_mk)."""
    protocol: str
    start: str
    """Where the initial weights come from."""
    settings: dict[str, Any]
    detector: str
    """Folder of the trained detector."""
    boxes: dict[str, float | None]
    masks: dict[str, float | None]
    classes: Sequence[dict[str, Any]]
    detections: int
    faults: int
    """Problems in annotations and images."""
    faults_file: str | None
    figure: str | None
    model_sha256: str


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
    """The rows of the JSON file; the figure has at most the first 24."""
    neighbor_purity: list[float | None]
    """For each position in the list (1st, 2nd, … neighbor by w), the share of the queries whose neighbor there has
    their class; None without labels."""
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
    """exp(z1·NN_i/τ) over the denominator; 0 for a neighbor that is not part of the denominator."""
    term: float
    """w_i p_i (form "inside") or w_i (−log p_i) (form "outside")."""
    share: float
    """The term divided by the sum of all terms."""


@dataclass(frozen=True)
class Explanation(Result):
    """The loss of one image in one direction, term by term: y2 first, then the neighbors by cosine."""

    image: str
    view: str
    """How the view was made, in words."""
    candidates: str
    """What was searched, in words."""
    loss: float
    form: str
    """The setting `loss_form`."""
    sides: str
    tau: float
    gamma: float | str
    denominator: str
    """What p is divided by, in words."""
    neighbors: int
    """Their number."""
    terms: list[ExplainedTerm]
    note: str | None
    """Why neighbors are named by number only, if they are."""
    figure: str | None = None
    gate: str | None = None
    """Says that the last epoch of the run had no neighbors in the loss, if so."""


@dataclass(frozen=True)
class CurateResult(Result):
    """The written list: how many images were found, and the protocol by which."""

    find: str
    file: str
    keep: str | None
    found: int
    images: int
    groups: int | None
    """Groups of near-duplicates."""
    protocol: str
    entries: list[dict[str, Any]]
    """The first 20 entries: key and reason."""
    skipped: int

    @property
    def warnings(self) -> list[str]:
        """A warning if implausibly many images are near-duplicates."""
        if not self.groups or self.found <= MANY_DUPLICATES * self.images:
            return []
        return [
            f"{self.found / self.images:.0%} of the images is an implausible share of near-duplicates. The encoder may"
            " not tell your images apart yet: look at some groups, and raise --threshold."
        ]


def append_result(
    run: Path | str, kind: str, numbers: Mapping[str, float | int | None], protocol: str, **facts: Any
) -> dict[str, Any]:
    """Append one result ("knn", "linear" …) to the run's results.jsonl and return the record.

    `protocol` states how the numbers were measured; `facts` are further JSON values. A number that is not finite is
    written as null.

    >>> import tempfile; run = tempfile.mkdtemp()
    >>> _ = append_result(run, "knn", {"top1": 0.73}, "kNN: k = 200", step=100)
    >>> [(result["kind"], result["numbers"], result["step"]) for result in read_results(run)]
    [('knn', {'top1': 0.73}, 100)]
    """
    path = RunDir(run).results
    if not path.parent.is_dir():
        raise UserError(f"there is no run directory {path.parent}: give the --out of snclr pretrain")
    record = {
        "kind": kind,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numbers": {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()},
        "protocol": protocol,
        **facts,
    }
    append_jsonl(path, record)
    return record


def read_results(run: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """Return all results of a run, or those of one kind, oldest first."""
    results = read_jsonl(RunDir(run).results, fields={"kind": str, "numbers": dict}, on_invalid="warn")
    return [record for record in results if kind is None or record["kind"] == kind]
