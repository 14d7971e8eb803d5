"""`snclr search`: the most similar images of a collection to an image, by cosine of the encoder's features."""

from dataclasses import replace
from pathlib import Path

import torch

from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.errors import UserError, snclr_command
from snclr.evaluation.features import Features
from snclr.evaluation.results import SearchResult
from snclr.evaluation.retrieval.embeddings import Embeddings, read_embeddings
from snclr.evaluation.retrieval.gallery import Gallery, Queries, neighbor_rows
from snclr.evaluation.retrieval.neighbors import DrawRows
from snclr.evaluation.retrieval.queries import open_queries
from snclr.evaluation.retrieval.space import EmbeddingSpace, encoder_space
from snclr.evaluation.session import Session, data_of
from snclr.evaluation.state import on_rank_zero
from snclr.io.atomic import check_writable
from snclr.io.hashing import weights_digest

MAX_ROWS = 12  # queries in the figure


def search_images(
    session: Session, image: str | Path, *, data: str | None, k: int, index: str, embeddings: str | Path | None,
    split: str | None, out: str | Path | None, draw: DrawRows,
) -> SearchResult:  # fmt: skip
    """Find the k most similar images of a collection to an image, or to each image of a folder."""

    def opening() -> tuple[EmbeddingSpace, Embeddings | None, ImageDataset, ImageDataset]:
        space = encoder_space(session.run)
        saved = None if embeddings is None else _read(Path(embeddings), space, session.run)
        collection = _open_collection(data, session.run, split, saved)
        return space, saved, collection, open_queries(image, collection)

    if out is not None:
        on_rank_zero(lambda: check_writable(Path(out), "choose another --out"))
    space, saved, collection, dataset = session.open(opening)
    queries = Queries.embed(replace(session, cache=False), space, dataset)
    if saved is None:
        gallery = Gallery.embed(session, space, collection)
    else:
        index_of = {collection.key(i): i for i in range(len(collection))}
        ids = torch.tensor([index_of[key] for key in saved.keys])
        gallery = Gallery.from_features(Features(torch.from_numpy(saved.features), None, ids), collection)
    rows, hits = neighbor_rows(queries, gallery, k, index=index)
    if out is not None:
        title = f"most similar in {collection.name}"
        shown = rows[:MAX_ROWS]
        on_rank_zero(lambda: draw(shown, dataset.load, gallery.load, Path(out), title=title, show="cosine"))
    return SearchResult(
        queries=rows,
        k=k,
        collection=collection.name,
        images=len(gallery.ids),
        method=hits.method,
        recall=hits.recall,
        skipped=[*queries.features.skipped, *gallery.skipped],
        figure=None if out is None else str(out),
    )


def _read(path: Path, space: EmbeddingSpace, run: Path) -> Embeddings:
    """Read an embeddings file of the run's present weights."""
    saved = read_embeddings(path)
    if saved.metadata.get("weights_sha256") != weights_digest(space.networks["encoder"].state_dict()):
        again = snclr_command("embed", run, "--out", path, "--overwrite")
        raise UserError(
            f"{path} was written with other weights (run {saved.metadata.get('run')}) than those of {run}. Features of "
            f"two encoders cannot be compared; write it again: {again}"
        )
    return saved


def _open_collection(data: str | None, run: Path, split: str | None, saved: Embeddings | None) -> ImageDataset:
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
