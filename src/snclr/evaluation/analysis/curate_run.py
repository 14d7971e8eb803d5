"""`snclr curate`: find images by the features of a run and write list files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.datasets.folder import nested_classes
from snclr.data.splits import holds_out_test, open_splits
from snclr.errors import UserError
from snclr.evaluation.analysis import curation
from snclr.evaluation.analysis.graph import neighbor_graph
from snclr.evaluation.results import CurateResult
from snclr.evaluation.retrieval.space import EmbeddingSpace, encoder_space
from snclr.evaluation.session import Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.io.atomic import check_writable, explain_unwritable, write_atomic

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
                    write_atomic(path, curation.format_list(dataset, listed, header))

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
    groups = curation.duplicate_groups(curation.similar_pairs(images.features, threshold), len(images.features))
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
        for row, nearest, cosine in curation.leaks(train.features, test.features, threshold)
    }
    likely = "to the encoder, different images can be as similar as copies"
    return Findings(
        rows, f"possible leaks: test images with a cosine ≥ {threshold:g} to an image of {train.dataset.name}; {likely}"
    )


def _outliers(images: Images, k: int, number: int) -> Findings:
    graph = neighbor_graph(images.features, k)
    scores, k = curation.outlier_scores(graph), graph.index.shape[1]
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
    suspects = curation.suspect_labels(graph, labels)
    rows = {
        suspect.row: f"labeled {names[int(labels[suspect.row])]} ({suspect.own_share:.0%} of the vote), neighbors vote "
        f"{names[suspect.voted]} ({suspect.share:.0%})"
        for suspect in suspects[:number]
    }
    protocol = (
        f"suspect labels: leave-one-out vote of {graph.index.shape[1]} neighbors, weights "
        f"exp(cosine / {curation.VOTE_TEMPERATURE:g}), {len(suspects):,} disagree"
    )
    return Findings(rows, protocol)


def _diverse(images: Images, number: int) -> Findings:
    chosen, cosines = curation.diverse_subset(images.features, number)
    rows = {
        row: f"{n}: cosine at most {cosine:.4f} to those before" if n > 1 else "1: nearest to the mean of all images"
        for n, (row, cosine) in enumerate(zip(chosen.tolist(), cosines.tolist(), strict=True), start=1)
    }
    return Findings(rows, "diverse subset: greedy k-center by cosine of encoder features")
