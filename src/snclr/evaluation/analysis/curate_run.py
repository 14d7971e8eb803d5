"""`snclr curate`: find images by the features of a run and write list files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.splits import open_splits
from snclr.errors import UserError
from snclr.evaluation.analysis import curation
from snclr.evaluation.analysis.graph import neighbor_graph
from snclr.evaluation.analysis.lists import Entry, format_list
from snclr.evaluation.analysis.results import CurateResult
from snclr.evaluation.features import Features
from snclr.evaluation.session import Session, data_of, run_encoder
from snclr.io.atomic import check_writable, explain_unwritable, write_atomic

_UNWRITABLE = "choose another --out"


def curate_run(
    session: Session, run: str | Path, *, out: Path, find: str, keep: Path | None, data: str | None, test: str | None,
    threshold: float, number: int, k: int, workers: int,
) -> CurateResult:  # fmt: skip
    """Find images of a dataset and write them, with reasons, to `out`; all others to `keep`."""
    if not -1 <= threshold <= 1 or number < 1 or k < 1:
        raise UserError(
            f"threshold {threshold:g}, number {number}, k {k}: allowed are a threshold from -1 to 1, and at least 1"
        )
    for path in (out, keep):
        if path is not None:
            check_writable(path, _UNWRITABLE)
    encoder, spec = run_encoder(run)
    spec_data = data or data_of(run)
    dataset: ImageDataset
    train: Features | None = None

    def features(images: ImageDataset, description: str) -> Features:
        return session.features(
            run, encoder, images, image_size=spec.image_size, workers=workers, description=description
        )

    if find == "leaks":
        train_images, dataset, description = open_splits(spec_data, test)
        if train_images is dataset or (test is None and "held out" in description):
            raise UserError("leaks need separate test images: give --test, or data with a train and a test folder")
        train = features(train_images, "training features")
    else:
        train_images = dataset = open_dataset(spec_data, download=True)
        description = dataset.name
    found = features(dataset, "features")
    unit, groups = F.normalize(found.features, dim=1), None
    if find == "duplicates":
        pairs = curation.similar_pairs(unit, threshold)
        grouped = curation.duplicate_groups(pairs, len(unit))
        groups = len(grouped)
        rows = [_duplicate(unit, group, row, dataset, found) for group in grouped for row in group[1:]]
        protocol = f"near-duplicates: cosine of encoder features ≥ {threshold:g}; the first of each group is kept"
    elif find == "leaks":
        assert train is not None
        near = curation.leaks(F.normalize(train.features, dim=1), unit, threshold)
        rows = [
            (int(a), f"leak: cosine {c:.4f} to the training image {train_images.key(int(train.ids[b]))}")
            for a, b, c in zip(near.one.tolist(), near.other.tolist(), near.cosine.tolist(), strict=True)
        ]
        protocol = f"leaks: test images with a training image of cosine ≥ {threshold:g}; {description}"
    elif find == "outliers":
        graph = neighbor_graph(unit, k)
        scores = curation.outlier_scores(graph)
        best = scores.argsort(descending=True, stable=True)[:number].tolist()
        width = graph.index.shape[1]
        rows = [(row, f"outlier: mean cosine {1 - scores[row]:.4f} to its {width} nearest images") for row in best]
        protocol = f"outliers: the {len(rows)} images with the smallest mean cosine to their {width} nearest"
    elif find == "labels":
        rows, protocol = _suspects(unit, found.labels, dataset, k, number)
    elif find == "diverse":
        chosen, cosines = curation.diverse_subset(unit, number)
        rows = [
            (row, f"{n}: cosine at most {c:.4f} to those before" if n > 1 else "1: nearest to the mean of all images")
            for n, (row, c) in enumerate(zip(chosen.tolist(), cosines.tolist(), strict=True), start=1)
        ]
        protocol = f"diverse subset of {number} images: greedy k-center by cosine of encoder features"
    else:
        raise UserError(f"find is {find!r}; choose duplicates, leaks, outliers, labels or diverse")
    entries = [Entry(int(found.ids[row]), reason) for row, reason in rows]
    header = [f"{protocol}; {len(entries):,} of {len(dataset):,} images of {dataset.name}", f"by snclr curate {run}"]
    _write(out, format_list(dataset, entries, header))
    if keep is not None:
        listed = {entry.index for entry in entries}
        rest = [Entry(index, "") for index in found.ids.tolist() if index not in listed]
        _write(keep, format_list(dataset, rest, [f"all images but those of {out.name}: {protocol}", header[1]]))
    shown: list[dict[str, Any]] = [{"key": dataset.key(e.index), "reason": e.reason} for e in entries[:20]]
    return CurateResult(
        find, str(out), None if keep is None else str(keep), len(entries), len(dataset), groups, protocol, shown,
        len(found.skipped),
    )  # fmt: skip


def _duplicate(unit: Tensor, group: list[int], row: int, dataset: ImageDataset, found: Features) -> tuple[int, str]:
    """Return the row and the reason: its most similar image of the group."""
    others = torch.tensor([other for other in group if other != row])
    cosine = unit[others] @ unit[row]
    best = int(cosine.argmax())
    key = dataset.key(int(found.ids[others[best]]))
    return row, f"near-duplicate of {key} (cosine {float(cosine[best]):.4f}, group of {len(group)})"


def _suspects(
    unit: Tensor, labels: Tensor | None, dataset: ImageDataset, k: int, number: int
) -> tuple[list[tuple[int, str]], str]:
    if labels is None or not bool((labels >= 0).any()):
        raise UserError(f"{dataset.name} has no labels; give --data with one folder per class or a list with labels")
    graph = neighbor_graph(unit, k)
    names = dataset.classes or [str(n) for n in range(int(labels.max()) + 1)]
    suspects = curation.suspect_labels(graph, labels)
    rows = [
        (
            s.row,
            f"labeled {names[int(labels[s.row])]} ({s.own_share:.0%} of the vote), neighbors vote {names[s.voted]} "
            f"({s.share:.0%})",
        )
        for s in suspects[:number]
    ]
    width = graph.index.shape[1]
    return rows, (
        f"suspect labels: leave-one-out vote of {width} neighbors, weights exp(cosine / {curation.VOTE_TEMPERATURE:g}); "
        f"{len(suspects):,} disagree"
    )


def _write(path: Path, text: str) -> None:
    with explain_unwritable(path, _UNWRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
