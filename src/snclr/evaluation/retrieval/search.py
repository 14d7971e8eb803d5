"""`snclr search`: the most similar images of a collection to an image, by cosine of the encoder's features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.distributed.collectives import raise_on_all_ranks
from snclr.errors import UserError
from snclr.evaluation.retrieval.embeddings import Embeddings, read_embeddings
from snclr.evaluation.retrieval.gallery import Gallery, Queries, neighbor_rows
from snclr.evaluation.retrieval.neighbors import DrawRows
from snclr.evaluation.retrieval.query_images import open_queries
from snclr.evaluation.retrieval.results import SearchResult
from snclr.evaluation.session import Session, data_of, run_encoder
from snclr.io.atomic import check_writable
from snclr.io.hashing import weights_digest
from snclr.models.encoders import EncoderSpec

MAX_ROWS = 12  # queries in the figure


def search_images(
    session: Session, run: str | Path, image: str | Path, *, data: str | None, k: int, index: str,
    embeddings: str | Path | None, split: str | None, out: str | Path | None, workers: int, draw: DrawRows,
) -> SearchResult:  # fmt: skip
    """Find the k most similar images of a collection to an image, or to each image of a folder."""

    def opening() -> tuple[nn.Module, EncoderSpec, Embeddings | None, ImageDataset, ImageDataset]:
        encoder, spec = run_encoder(run)
        saved = None if embeddings is None else _read(Path(embeddings), weights_digest(encoder.state_dict()), run)
        collection = _open_collection(data, run, split, saved)
        return encoder, spec, saved, collection, open_queries(image, collection)

    with raise_on_all_ranks():
        if session.is_rank_zero and out is not None:
            check_writable(Path(out), "choose another --out")
    encoder, spec, saved, collection, dataset = session.open(opening)
    common: dict[str, Any] = {"image_size": spec.image_size, "workers": workers}
    query = replace(session, cache=False).features(run, encoder, dataset, description="queries", **common)
    if saved is None:
        features = session.features(run, encoder, collection, description="collection", **common)
        gallery = Gallery.from_features(features, collection)
    else:
        gallery = Gallery.from_embeddings(saved, collection)
    rows, hits = neighbor_rows(Queries(dataset, query, query.features), gallery, k, index=index)
    if out is not None and session.is_rank_zero:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        title = f"most similar in {collection.name}"
        draw(rows[:MAX_ROWS], dataset.load, gallery.load, Path(out), title=title, show="cosine")
    return SearchResult(
        queries=rows,
        k=k,
        collection=collection.name,
        images=len(gallery.ids),
        method=hits.method,
        recall=hits.recall,
        skipped=[*query.skipped, *gallery.skipped],
        figure=None if out is None else str(out),
    )


def _read(path: Path, weights: str, run: str | Path) -> Embeddings:
    """Read an embeddings file of the run's present weights."""
    saved = read_embeddings(path)
    if saved.metadata.get("weights_sha256") != weights:
        raise UserError(
            f"{path} was written with other weights (run {saved.metadata.get('run')}) than those of {run}. Features of "
            f"two encoders cannot be compared; write it again: snclr embed {run} --out {path}"
        )
    return saved


def _open_collection(data: str | None, run: str | Path, split: str | None, saved: Embeddings | None) -> ImageDataset:
    """Open the collection; with embeddings, the images these were written for."""
    if saved is None:
        return open_dataset(data or data_of(run), split=split or "train", download=True)
    name, saved_split = str(saved.metadata.get("data")), str(saved.metadata.get("split", "train"))
    if split not in (None, saved_split):
        raise UserError(
            f"the embeddings are of split {saved_split!r} of {name}, not {split!r}. Omit --split, or write the "
            f"embeddings of {split!r} with snclr embed"
        )
    dataset = open_dataset(data or name, split=saved_split, download=True)
    if dataset.fingerprint() != saved.metadata.get("fingerprint"):
        raise UserError(
            f"the images of {dataset.name} are not those the embeddings were written for ({name}). Write the "
            "embeddings again with snclr embed, or give the same --data"
        )
    return dataset
