"""`snclr curate`: find near-duplicates, leaks, outliers, suspect labels or a diverse subset, and write list files.

The functions that find take L2-normalized features (n, D) and only report; no image is changed or deleted.
`format_list` names the images found in a list file, which `--data` and `finetune --labels` read.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.datasets.folder import nested_classes
from snclr.data.splits import holds_out_test, open_splits
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, OnProgress, neighbor_graph
from snclr.evaluation.results import CurateResult
from snclr.evaluation.retrieval.space import EmbeddingSpace, encoder_space
from snclr.evaluation.session import Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.io.atomic import check_writable, explain_unwritable, write_atomic
from snclr.methods.common import kernels

VOTE_TEMPERATURE = 0.07
"""Weights of the vote are exp(cosine / temperature), as in the kNN evaluation."""
MAX_PAIRS = 200_000
_ROWS = 1024
_UNWRITABLE = "choose another --out or --keep"
_SHOWN = 20


class Images(NamedTuple):
    """Readable images of a dataset: normalized features (n, D), ids (n,) and labels (n,) or None."""

    dataset: ImageDataset
    features: Tensor
    ids: Tensor
    labels: Tensor | None
    skipped: int

    def key(self, row: int) -> str:
        """Return the key of the image in a row."""
        return self.dataset.key(int(self.ids[row]))


class Findings(NamedTuple):
    """The reason of each row, how the rows were found, and the number of groups of near-duplicates."""

    rows: dict[int, str]
    protocol: str
    groups: int | None = None


def curate_run(
    session: Session, *, out: Path, find: str, keep: Path | None, data: str | None, test: str | None,
    threshold: float, number: int, k: int, overwrite: bool = False,
) -> CurateResult:  # fmt: skip
    """Find images of a dataset and write them, with reasons, to `out`; all others to `keep`."""
    on_rank_zero(lambda: _check_lists([out] if keep is None else [out, keep], overwrite=overwrite))
    finders: dict[str, Callable[[Images], Findings]] = {
        "duplicates": lambda images: _duplicates(images, threshold),
        "outliers": lambda images: _outliers(images, k, number),
        "labels": lambda images: _suspects(images, k, number),
        "diverse": lambda images: _diverse(images, number),
    }
    if find not in ("leaks", *finders):
        raise UserError(f"find is {find!r}; choose leaks, {', '.join(finders)}")
    space = session.open(lambda: encoder_space(session.run))
    spec = data or data_of(session.run)
    if find == "leaks":
        train, images = _open_pair(session, space, spec, test)
        found = _leaks(train, images, threshold)
    else:
        images = _images(session, space, session.open(lambda: open_dataset(spec, download=True)), "features")
        found = finders[find](images)
    dataset, ids = images.dataset, images.ids.tolist()
    reasons = {ids[row]: reason for row, reason in found.rows.items()}
    rest = dict.fromkeys((index for index in ids if index not in reasons), "")
    title = f"{found.protocol}; {len(reasons):,} of {len(dataset):,} images of {dataset.name}"
    lists = [(out, reasons, title), (keep, rest, f"all images but those of {out.name}")]

    def write() -> None:
        for path, listed, described in lists:
            if path is not None:
                with explain_unwritable(path, _UNWRITABLE):
                    header = [described, f"by snclr curate {session.run} --find {find}"]
                    write_atomic(path, format_list(dataset, listed, header))

    on_rank_zero(write)
    return CurateResult(
        find, str(out), None if keep is None else str(keep), len(reasons), len(dataset), found.groups, found.protocol,
        [{"key": dataset.key(index), "reason": reason} for index, reason in islice(reasons.items(), _SHOWN)],
        images.skipped,
    )  # fmt: skip


def _check_lists(paths: list[Path], *, overwrite: bool) -> None:
    """Raise UserError if a list cannot be written, would replace a file, or if both are the same file."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"--out and --keep are both {paths[0]}; give two files")
    for path in paths:
        check_writable(path, _UNWRITABLE, overwrite=overwrite)


def _images(session: Session, space: EmbeddingSpace, dataset: ImageDataset, description: str) -> Images:
    found = space.features(session, dataset, space.searched, description)
    return Images(dataset, F.normalize(found.features, dim=1), found.ids, found.labels, len(found.skipped))


def _open_pair(session: Session, space: EmbeddingSpace, data: str, test: str | None) -> tuple[Images, Images]:
    if holds_out_test(data, test):
        raise UserError(
            f"leaks need test images: give --test, or data with a train and a test folder ({data} has none)"
        )
    train, test_part, _ = session.open(lambda: open_splits(data, test))
    return _images(session, space, train, "training features"), _images(session, space, test_part, "test features")


def _duplicates(images: Images, threshold: float) -> Findings:
    groups = duplicate_groups(similar_pairs(images.features, threshold), len(images.features))
    rows = {}
    for group in groups:
        for row in group[1:]:
            others = torch.tensor([other for other in group if other != row])
            cosine, best = (images.features[others] @ images.features[row]).max(dim=0)
            nearest = "" if int(others[best]) == group[0] else f" to {images.key(int(others[best]))}"
            reason = f"near-duplicate of {images.key(group[0])}, which is not listed"
            rows[row] = f"{reason} (cosine {float(cosine):.4f}{nearest}, group of {len(group)})"
    protocol = f"near-duplicates: cosine of encoder features ≥ {threshold:g}, the first of each group is not listed"
    return Findings(rows, protocol, len(groups))


def _leaks(train: Images, test: Images, threshold: float) -> Findings:
    rows = {
        row: f"possible leak: cosine {cosine:.4f} to the training image {train.key(nearest)}"
        for row, nearest, cosine in leaks(train.features, test.features, threshold)
    }
    likely = "to the encoder, different images can be as similar as copies"
    return Findings(
        rows, f"possible leaks: test images with a cosine ≥ {threshold:g} to an image of {train.dataset.name}; {likely}"
    )


def _outliers(images: Images, k: int, number: int) -> Findings:
    graph = neighbor_graph(images.features, k)
    scores, k = outlier_scores(graph), graph.index.shape[1]
    best = scores.argsort(descending=True, stable=True)[:number].tolist()
    rows = {row: f"outlier: mean cosine {1 - float(scores[row]):.4f} to its {k} nearest images" for row in best}
    return Findings(rows, f"outliers: smallest mean cosine to their {k} nearest images")


def _suspects(images: Images, k: int, number: int) -> Findings:
    labels = images.labels
    if labels is None or not bool((labels >= 0).any()):
        hint = nested_classes(images.dataset)
        raise UserError(
            f"{images.dataset.name} has no labels{hint}; give --data with one folder per class or a list with labels"
        )
    graph = neighbor_graph(images.features, k)
    names = images.dataset.class_names()
    suspects = suspect_labels(graph, labels)
    rows = {
        suspect.row: f"labeled {names[int(labels[suspect.row])]} ({suspect.own_share:.0%} of the vote), neighbors vote "
        f"{names[suspect.voted]} ({suspect.share:.0%})"
        for suspect in suspects[:number]
    }
    protocol = (
        f"suspect labels: leave-one-out vote of {graph.index.shape[1]} neighbors, weights "
        f"exp(cosine / {VOTE_TEMPERATURE:g}), {len(suspects):,} disagree"
    )
    return Findings(rows, protocol)


def _diverse(images: Images, number: int) -> Findings:
    chosen, cosines = diverse_subset(images.features, number)
    rows = {
        row: f"{n}: cosine at most {cosine:.4f} to those before" if n > 1 else "1: nearest to the mean of all images"
        for n, (row, cosine) in enumerate(zip(chosen.tolist(), cosines.tolist(), strict=True), start=1)
    }
    return Findings(rows, "diverse subset: greedy k-center by cosine of encoder features")


class Suspect(NamedTuple):
    """An image whose neighbors vote for another class."""

    row: int
    voted: int
    """The class with the most votes."""
    share: float
    """Share of the vote for that class."""
    own_share: float
    """Share of the vote for the image's own label."""


def similar_pairs(features: Tensor, threshold: float) -> Tensor:
    """Find all pairs of rows (p, 2) with a cosine of at least `threshold`; in blocks. UserError above 200,000 pairs.

    >>> similar_pairs(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 0.9).tolist()
    [[0, 2]]
    """
    found, count = [], 0
    for start in range(0, len(features), _ROWS):
        block = features[start : start + _ROWS]
        cosine = block @ features[start:].T  # each pair once: columns from this block on
        pairs = (cosine >= threshold).triu(diagonal=1).nonzero()
        count += len(pairs)
        if count > MAX_PAIRS:
            raise UserError(
                f"more than {MAX_PAIRS:,} pairs have a cosine of at least {threshold:g}; give a higher threshold"
            )
        found.append(pairs + start)
    return torch.cat(found)


def duplicate_groups(pairs: Tensor, n: int) -> list[list[int]]:
    """Join pairs (p, 2) of n rows to groups (connected components), the largest group first; rows ascend.

    >>> duplicate_groups(torch.tensor([[0, 1], [1, 4]]), 5)
    [[0, 1, 4]]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(pairs)), tuple(pairs.T.numpy())), shape=(n, n))
    _, component = connected_components(edges, directed=False)
    groups: dict[int, list[int]] = {}
    for row in torch.unique(pairs).tolist():
        groups.setdefault(int(component[row]), []).append(row)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def leaks(train: Tensor, test: Tensor, threshold: float) -> list[tuple[int, int, float]]:
    """Find the test images that have a training image of at least this cosine, most similar first.

    Each is given by its row, the row of the most similar training image, and their cosine.

    >>> leaks(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), 0.9)
    [(0, 1, 1.0)]
    """
    cosine, nearest = kernels.topk(test, train, 1)
    found = zip(range(len(test)), nearest[:, 0].tolist(), cosine[:, 0].tolist(), strict=True)
    return sorted((leak for leak in found if leak[2] >= threshold), key=lambda leak: -leak[2])


def outlier_scores(graph: Graph) -> Tensor:
    """Return 1 − the mean cosine to the k nearest neighbors (n,): large for an image unlike all others."""
    return 1 - graph.cosine.clamp(min=-1).mean(dim=1)


def suspect_labels(graph: Graph, labels: Tensor) -> list[Suspect]:
    """List the labeled images whose k neighbors vote for another class, the clearest first (leave-one-out kNN).

    `labels` (n,) has -1 for an unknown class; such images neither vote nor are listed.
    """
    near = labels[graph.index.clamp(min=0)]
    known = (graph.index >= 0) & (near >= 0)
    weight = torch.where(known, ((graph.cosine - 1) / VOTE_TEMPERATURE).exp(), 0.0).double()
    votes = torch.zeros(len(labels), int(labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, near.clamp(min=0), weight)
    total = votes.sum(dim=1)
    votes = votes / total.clamp(min=1e-300)[:, None]
    share, voted = votes.max(dim=1)
    own = votes.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    rows = ((labels >= 0) & (total > 0) & (voted != labels)).nonzero()[:, 0]
    order = rows[(share - own)[rows].argsort(descending=True, stable=True)]
    return [Suspect(row, int(voted[row]), float(share[row]), float(own[row])) for row in order.tolist()]


def diverse_subset(features: Tensor, n: int, report: OnProgress = lambda done, total: None) -> tuple[Tensor, Tensor]:
    """Choose n images that cover the set: rows (n,) in order of choice and their cosine to those chosen before (n,).

    Greedy k-center: the image nearest to the mean first, then always the one farthest from all chosen. The first m of
    a subset are the subset of m.

    >>> diverse_subset(torch.tensor([[1.0, 0.0], [0.9, 0.43], [0.0, 1.0]]), 2)[0].tolist()
    [1, 2]
    """
    if not 1 <= n <= len(features):
        raise UserError(f"a subset of {n} images cannot be chosen from {len(features):,}; give 1 to {len(features):,}")
    first = int((features @ features.mean(dim=0)).argmax())
    rows, cosines = [first], [0.0]
    nearest = features @ features[first]
    while len(rows) < n:
        nearest[rows[-1]] = torch.inf  # never chosen twice, even among equal images
        row = int(nearest.argmin())
        rows.append(row)
        cosines.append(float(nearest[row]))
        torch.maximum(nearest, features @ features[row], out=nearest)
        if len(rows) % 64 == 0:
            report(len(rows), n)
    return torch.tensor(rows), torch.tensor(cosines)


def format_list(dataset: ImageDataset, reasons: Mapping[int, str], header: Iterable[str]) -> str:
    """Return the text of a list file: the images with these indices, each below its reason, unless that is empty.

    Files are written with their absolute path. An image without a file of its own is written by its key, which only
    `finetune --labels` reads. A name that no list can hold (line breaks, TAB, bytes that are not UTF-8) is a comment.
    """
    lines = [f"# {_one_line(text)}" for text in header]
    if any(dataset.file(index) is None for index in reasons):
        lines.append("# These images have no files of their own: use the list with snclr finetune --labels.")
    for index, reason in reasons.items():
        if reason:
            lines.append(f"# {_one_line(reason)}")
        file = dataset.file(index)
        name = dataset.key(index) if file is None else str(file.absolute())
        fits = "\t" not in name and len(name.splitlines()) == 1 and name[0] != "#"
        fits = fits and name == name.strip().encode(errors="replace").decode()  # UTF-8
        unlisted = f"# not listed, its name does not fit on a line: {_one_line(dataset.key(index))}"
        lines.append(name if fits else unlisted)
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Escape everything that would end a comment line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
