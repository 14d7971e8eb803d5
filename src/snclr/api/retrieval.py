"""Features and neighbors of images: `snclr.embed`, `snclr.search`, `snclr.neighbors`, `snclr.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snclr.api.early_checks import check_file, check_numbers, check_query, check_run_and_data, checked_session
from snclr.api.options import SessionOptions, with_options
from snclr.errors import UserError
from snclr.evaluation.results import FORMATS, MAX_NEIGHBORS, EmbedResult, Explanation, NeighborsResult, SearchResult
from snclr.runtime.progress import set_torch_status
from snclr.runtime.settings import Range

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_options(SessionOptions)
def embed(
    run: str | Path,
    *,
    out: str | Path,
    data: str | None = None,
    split: str = "train",
    normalize: bool = False,
    layout: Literal["none", "pca", "umap"] = "pca",
    neighbors: int = 10,
    batch_size: int = 128,
    overwrite: bool = False,
    **options: Unpack[SessionOptions],
) -> EmbedResult:
    """Write the features of every readable image's center crop to a file.

    A stop (Ctrl-C, SIGTERM) raises StopRequested; the same call continues with the cached features.

    Args:
        run: Run directory, the --out of snclr pretrain.
        out: File to write: .npy, .npz or .parquet.
        data: Images: a folder, a list, shards or a dataset name (default: the run's training data).
        split: Split of the dataset: train, test, all …
        normalize: Scale each feature vector to length 1, so that a dot product is a cosine.
        layout: 2-D layout in a parquet file, as columns projection_x and projection_y.
        neighbors: Nearest images of each image in a parquet file (0: none); the exact search is quadratic in the
            number of images.
        batch_size: Images per forward pass.
        overwrite: Replace an existing file.
        options: Those of `SessionOptions`.
    """
    check_numbers(Range(ge=1), batch_size=batch_size)
    check_numbers(Range(ge=0), neighbors=neighbors)
    check_file(out, suffixes=FORMATS, overwrite=overwrite)
    with checked_session(run, data, **options) as session:
        from snclr.evaluation.retrieval.embeddings import embed_dataset

        return embed_dataset(
            session, out=out, data=data, split=split, normalize=normalize, batch_size=batch_size, layout=layout,
            neighbors=neighbors, overwrite=overwrite,
        )  # fmt: skip


@with_options(SessionOptions)
def search(
    run: str | Path,
    image: str | Path,
    *,
    data: str | None = None,
    k: int = 10,
    index: Literal["auto", "exact", "faiss"] = "auto",
    embeddings: str | Path | None = None,
    split: str | None = None,
    out: str | Path | None = None,
    **options: Unpack[SessionOptions],
) -> SearchResult:
    """Find the most similar images of a collection, by cosine of the encoder's features.

    An image that is itself in the collection is not returned. A stop (Ctrl-C, SIGTERM) raises StopRequested; the same
    call continues with the cached features.

    Args:
        run: Run directory, the --out of snclr pretrain.
        image: Image file, folder of images, or key of an image in the collection.
        data: The collection: a folder, a list, shards or a dataset name (default: the run's training data).
        k: Number of similar images.
        index: exact search, a faiss index, or auto: the faster of the two.
        embeddings: Features of the collection: a file written by snclr embed.
        split: Split of the collection (default: train, or that of --embeddings).
        out: PNG file for a figure of the first 12 queries.
        options: Those of `SessionOptions`.
    """
    check_numbers(Range(ge=1), k=k)
    check_file(out, suffixes=(".png",))
    if embeddings is None:  # else these name the collection
        check_query(run, image, data, split=split)
    with checked_session(run, data, **options) as session:
        from snclr.evaluation.retrieval.index import choose_index
        from snclr.evaluation.retrieval.search import search_images
        from snclr.reports.figures.neighbors import draw_neighbors

        choose_index(index, 1, 1)  # rejects a missing faiss before anything is computed
        return search_images(
            session, image, data=data, k=k, index=index, embeddings=embeddings, split=split, out=out,
            draw=draw_neighbors,
        )  # fmt: skip


@with_options(SessionOptions)
def neighbors(
    run: str | Path,
    images: str | Path | Sequence[str | Path] = (),
    *,
    data: str | None = None,
    candidates: str | None = None,
    k: int = 5,
    rows: int = 6,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Unpack[SessionOptions],
) -> NeighborsResult:
    """Draw images with their nearest neighbors and positiveness, as in the paper's figure.

    Images are compared as in training: by the projections y2 (Eq. 3), ranked by positiveness w (Eq. 4) with the run's
    K, gamma and temperature. Runs of other methods are compared by their encoder's features. A stop (Ctrl-C, SIGTERM)
    raises StopRequested; the same call continues with the cached features.

    Args:
        run: Run directory, the --out of snclr pretrain.
        images: Image files, folders, or keys of images in the data (default: a sample of --data).
        data: Images to draw and to search in (default: the run's training data).
        candidates: Where to search: queue, or images such as a folder (default: --data).
        k: Neighbors per image; the paper shows 5 and 10.
        rows: Number of query images if no IMAGE is given; the figure has at most 24, the JSON file all.
        seed: Seed of the image sample.
        out: PNG file of the figure (default: RUN/figures/neighbors.png).
        options: Those of `SessionOptions`.
    """
    check_numbers(Range(ge=1, le=MAX_NEIGHBORS), k=k)
    check_numbers(Range(ge=1), rows=rows)
    check_file(out, suffixes=(".png",))
    queries = [images] if isinstance(images, (str, Path)) else list(images)
    for image in queries if candidates in (None, "queue") else ():  # else its key may be one of the candidates
        check_query(run, image, data)
    with checked_session(run, data, None if candidates == "queue" else candidates, **options) as session:
        from snclr.evaluation.retrieval.neighbors import find_neighbors
        from snclr.reports.figures.neighbors import draw_neighbors

        return find_neighbors(
            session, queries, data=data, candidates=candidates, k=k, rows=rows, seed=seed, out=out,
            draw=draw_neighbors,
        )  # fmt: skip


def explain(
    run: str | Path,
    image: str | Path,
    *,
    candidates: str = "queue",
    out: str | Path | None = None,
    workers: int = 0,
    device: str = "auto",
    quiet: bool = False,
) -> Explanation:
    """Explain the SNCLR loss of one image: cosine, positiveness, probability and share of each neighbor.

    Args:
        run: Run directory, the --out of snclr pretrain.
        image: Image file, or key of an image in the run's data.
        candidates: Where to search: queue, or images such as a folder.
        out: PNG file of the figure (default: RUN/figures/explain-IMAGE.png).
        workers: Dataloader worker processes per rank.
        device: Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one.
        quiet: Print no progress.
    """
    check_file(out, suffixes=(".png",))
    check_run_and_data(run, None if candidates == "queue" else candidates, device=device)
    if Path(image).expanduser().is_dir():
        raise UserError(f"{image} is a folder; give one image")
    check_query(run, image)
    set_torch_status()
    from snclr.evaluation.retrieval.explain import explain_image
    from snclr.reports.figures.neighbors import draw_explanation

    return explain_image(
        run, image, candidates=candidates, out=out, workers=workers, device=device, quiet=quiet, draw=draw_explanation
    )
