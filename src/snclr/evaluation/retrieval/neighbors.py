"""`snclr neighbors`: images with their nearest neighbors and positiveness, as in the paper's figure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.decode import RGBImage
from snclr.data.sampler import epoch_order
from snclr.errors import UserError, count
from snclr.evaluation.features import Features
from snclr.evaluation.results import NeighborRow, NeighborsResult
from snclr.evaluation.retrieval.gallery import Gallery, Queries, measure_purity, rank_as_trained
from snclr.evaluation.retrieval.queries import open_queries
from snclr.evaluation.retrieval.space import EmbeddingSpace, open_space
from snclr.evaluation.session import Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.evaluation.subsets import sort_by_class
from snclr.io.atomic import check_writable, write_atomic

MAX_QUERIES = 10_000  # of a dataset: enough to measure the purity at each position to within one percent
MAX_ROWS = 24  # most rows in the figure; the JSON file has all
DrawRows = Callable[..., None]
"""`snclr.reports.figures.neighbors.draw_neighbors`: passed in, as `reports` imports `evaluation`."""


def find_neighbors(
    session: Session, images: Sequence[str | Path], *, data: str | None, candidates: str | None, k: int, rows: int,
    seed: int, out: str | Path | None, draw: DrawRows,
) -> NeighborsResult:  # fmt: skip
    """Find the neighbors of query images, or of a dataset; write the figure and its rows as JSON.

    The neighbor purity of a dataset is also recorded in the run's results.jsonl.
    """
    if out is not None:
        on_rank_zero(lambda: check_writable(Path(out), "choose another --out"))
    space, dataset = session.open(
        lambda: (
            open_space(session.run, queue=candidates == "queue", device=session.device),
            _open_data(session.run, data, required=not (images and candidates)),
        )
    )
    if images:
        queries, gallery, described = _given_queries(session, space, dataset, images, candidates)
    else:
        assert dataset is not None
        most = max(rows, MAX_QUERIES)
        queries, gallery, described = sampled_queries(session, space, dataset, candidates, most=most, seed=seed)
    table = [(each.dataset, row) for each in queries for row in rank_as_trained(each, gallery, k, space)]
    purity, chance, purity_description = measure_purity([row for _, row in table], gallery)
    protocol = (
        f"the {k} nearest by cosine of {space.description}; candidates: {gallery.description}; an image is never its "
        f"own neighbor; center crops; {described}"
    )
    weights = space.describe_weights(k)
    drawn = table if images else table[:rows]
    name = f"neighbors-{Path(images[0]).stem}.png" if images else "neighbors.png"
    figure = RunDir(session.run).figures / name if out is None else Path(out)
    facts = {"protocol": protocol, "weights": weights, "neighbor_purity": purity}
    on_rank_zero(lambda: _write(figure, drawn, gallery, facts, draw))
    if not images and any(share is not None for share in purity):
        numbers = {f"neighbor_purity_at_{position}": share for position, share in enumerate(purity, start=1)}
        session.record("neighbors", numbers, protocol, n=len(table), chance=chance)
    return NeighborsResult(
        rows=[row for _, row in drawn],
        neighbor_purity=purity,
        chance=chance,
        purity_description=purity_description,
        queries=len(table),
        weights=weights,
        protocol=protocol,
        skipped=[skip for each in queries for skip in each.features.skipped],
        figure=str(figure),
        table=str(figure.with_suffix(".json")),
    )


def _given_queries(
    session: Session, space: EmbeddingSpace, dataset: ImageDataset | None, images: Sequence[str | Path],
    candidates: str | None,
) -> tuple[list[Queries], Gallery, str]:  # fmt: skip
    """Return the query images that were given, the gallery, and a description of the queries."""
    gallery = _open_gallery(session, space, dataset, candidates)
    opened = session.open(lambda: [open_queries(image, gallery.dataset, dataset) for image in images])
    uncached = replace(session, cache=False, quiet=True)
    queries = [Queries.embed(uncached, space, each) for each in opened]
    return queries, gallery, count(sum(len(each.features.ids) for each in queries), "query image")


def sampled_queries(
    session: Session, space: EmbeddingSpace, dataset: ImageDataset, candidates: str | None, *, most: int, seed: int
) -> tuple[list[Queries], Gallery, str]:
    """Return at most `most` images of a dataset as queries, the gallery, and a description of the queries."""
    whole = Queries.embed(session, space, dataset)
    if candidates is None:
        gallery = Gallery.from_features(whole.features, dataset, space.projections(session, dataset))
    else:
        gallery = _open_gallery(session, space, dataset, candidates)
    total, source = len(whole.features.ids), f"of {dataset.name}, seed {seed}"
    described = f"{most:,} of the {total:,} query images" if total > most else count(total, "query image")
    return [whole.take(pick_queries(whole.features, most, seed=seed))], gallery, f"{described} {source}"


def pick_queries(features: Features, most: int, *, seed: int = 0) -> torch.Tensor:
    """Return the positions of `most` random rows, or of all if there are fewer.

    With labels, the classes alternate and unlabeled rows come last.
    """
    order = epoch_order(len(features.ids), seed, epoch=0)
    if features.labels is not None:
        by_class, turn = sort_by_class(labels := features.labels.numpy(), order)
        order = by_class[np.lexsort((labels[by_class], turn, labels[by_class] < 0))]
    return torch.tensor(order[:most])  # a copy: the order may be read-only


def _open_data(run: Path, data: str | None, *, required: bool) -> ImageDataset | None:
    """Open `data` or the run's own images; None if they are neither required nor available."""
    try:
        return open_dataset(data or data_of(run), download=True)
    except UserError:
        if required or data is not None:
            raise
        return None


def _open_gallery(
    session: Session, space: EmbeddingSpace, dataset: ImageDataset | None, candidates: str | None
) -> Gallery:
    """Open the queue, the images given as candidates, or else the dataset."""
    if candidates == "queue":
        return session.open(lambda: Gallery.from_queue(session.run, space.queue))
    if candidates is not None:
        dataset = session.open(lambda: open_dataset(candidates, download=True))
    assert dataset is not None
    return Gallery.embed(session, space, dataset)


def _write(
    figure: Path, table: list[tuple[ImageDataset, NeighborRow]], gallery: Gallery, facts: dict[str, Any],
    draw: DrawRows,
) -> None:  # fmt: skip
    """Draw the figure and write its rows and `facts` as JSON beside it."""

    def load_query(number: int) -> RGBImage:
        dataset, row = table[number]
        return dataset.load(row.index)

    # `draw` loads a query by its index: here its row in the table, since the queries may be of several datasets.
    numbered = [replace(row, index=number) for number, (_, row) in enumerate(table[:MAX_ROWS])]
    draw(numbered, load_query, gallery.load, figure, show="cosine" if facts["weights"] is None else "w")
    content = {**facts, "rows": [asdict(row) for _, row in table]}
    write_atomic(figure.with_suffix(".json"), json.dumps(content, indent=1, ensure_ascii=False) + "\n")
