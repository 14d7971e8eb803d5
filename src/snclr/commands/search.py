"""`snclr search`: the most similar images of a collection to one image, or to each image of a folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import Session, add_compute_flags, data_of, finish, run_encoder, session
from snclr.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from snclr.data.sources import Source
    from snclr.encoders import EncoderSpec
    from snclr.evaluate.embeddings import Embeddings
    from snclr.evaluate.features import Features
    from snclr.evaluate.neighbors import NeighborRow
    from snclr.evaluate.search_index import Found

MOST_ROWS = 12  # queries drawn; a taller figure helps nobody
EXAMPLES = """examples:
  snclr search runs/photos cat.jpg --data my-photos/
  snclr search runs/photos cat.jpg --data my-photos/ --k 5 --out similar.png
  snclr embed runs/photos --data my-photos/ --out photos.npy     # once
  snclr search runs/photos new-photos/ --embeddings photos.npy   # as often as you like

Similarity is the cosine of the encoder's features of centre crops. An image that is itself in the collection (the same
file, whatever its name) is not returned. IMAGE may also be the key of an image in the collection, e.g. demo/train/12.

--index auto searches exactly, except where an index saves work and faiss is installed (pip install 'snclr[faiss]'):
from 100,000 images on, with more queries than the index has lists (4√images). Its recall against the exact search is
measured on a sample of the queries and printed.
"""


def search(
    run: str | Path,
    image: str | Path,
    *,
    data: str | None = None,
    k: int = 10,
    index: str = "auto",
    embeddings: str | Path | None = None,
    split: str | None = None,
    out: str | Path | None = None,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    cache: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """The k most similar images of `data` to an image, or to every image of a folder, by the run's encoder.

    `embeddings` is a file of `snclr.embed` of the same run, whose features are then not computed again. `split` is a
    part of `data` (default: train, or that of the embeddings).
    """
    from snclr.evaluate.resume import Interrupted
    from snclr.evaluate.search_index import check_k, choose

    if out is not None and Path(out).suffix.lower() != ".png":
        raise UserError(f"the figure {out} must end in .png")
    # What cannot work is refused before anything is computed: an index that is not installed, too.
    check_k(k)
    choose(index, 1, 1)
    with session(device=device, devices=devices, nodes=nodes, cache=cache, quiet=quiet) as at:
        try:
            return _search(at, run, image, data, k=k, index=index, embeddings=embeddings, split=split, out=out,
                           workers=workers)  # fmt: skip
        except Interrupted as error:
            return at.stopped("search", error)


def _search(
    at: Session, run: str | Path, image: str | Path, data: str | None, *, k: int, index: str,
    embeddings: str | Path | None, split: str | None, out: str | Path | None, workers: int,
) -> dict[str, Any]:  # fmt: skip
    from snclr.distributed import together
    from snclr.durable import check_writable
    from snclr.evaluate.queries import open_queries, query_labels, same_images
    from snclr.evaluate.search_index import find_similar
    from snclr.export.encoder import weights_digest

    def opening() -> tuple[nn.Module, EncoderSpec, Embeddings | None, Source, Source]:
        encoder, spec = run_encoder(run)
        saved = None if embeddings is None else _saved(Path(embeddings), weights_digest(encoder.state_dict()), run)
        collection = _open_collection(data, run, split, saved)
        return encoder, spec, saved, collection, open_queries(image, collection)

    with together():
        if at.first and out is not None:
            check_writable(Path(out), "choose another place for --out")
    encoder, spec, saved, collection, queries = at.open(opening)
    common: dict[str, Any] = {"image_size": spec.image_size, "workers": workers}
    asked = replace(at, cache=False).features(run, encoder, queries, description="queries", **common)
    there = (
        at.features(run, encoder, collection, description="collection", **common)
        if saved is None
        else _as_features(saved, collection)
    )
    ours, theirs = same_images(queries, collection)
    found = find_similar(
        asked.features, there.features, k, index=index, query_ids=ours[asked.ids], collection_ids=theirs[there.ids]
    )
    rows = _rows(queries, asked, collection, there, found, query_labels(queries, collection, ours, theirs))
    figure = None if out is None or not at.first else _draw(rows, queries, collection, Path(out))
    return {
        "queries": [_with_paths(row, collection) for row in rows],
        "k": k,
        "collection": collection.name,
        "images": len(there.ids),
        "method": found.method,
        "recall": found.recall,
        "skipped": [asdict(skip) for skip in (*asked.skipped, *there.skipped)],
        "figure": figure,
    }


def _saved(path: Path, weights: str, run: str | Path) -> Embeddings:
    """Features of a file, if they are of this run's encoder."""
    from snclr.evaluate.embeddings import read_embeddings

    saved = read_embeddings(path)
    if saved.metadata.get("weights_sha256") != weights:
        raise UserError(
            f"{path} was written with other weights (run {saved.metadata.get('run')}) than those of {run}; features of "
            f"two encoders cannot be compared. Write it again: snclr embed {run} --out {path}"
        )
    return saved


def _open_collection(data: str | None, run: str | Path, split: str | None, saved: Embeddings | None) -> Source:
    from snclr.data.sources import open_source

    if saved is None:
        return open_source(data or data_of(run), split=split or "train", download=True)
    where, part = str(saved.metadata.get("data")), str(saved.metadata.get("split", "train"))
    if split not in (None, part):
        raise UserError(
            f"the embeddings are of the split {part!r} of {where}, and {split!r} was asked for. Leave --split out, or "
            f"write those of {split!r} with snclr embed"
        )
    source = open_source(data or where, split=part, download=True)
    if source.fingerprint() != saved.metadata.get("fingerprint"):
        raise UserError(
            f"the images of {source.name} are not those the embeddings were written for ({where}): names or number "
            "differ. Write them again with snclr embed, or give the same --data"
        )
    return source


def _as_features(saved: Embeddings, collection: Source) -> Features:
    """Features of a file under the numbers that the images have in the collection."""
    import torch

    from snclr.evaluate.features import Features

    place = {collection.key(index): index for index in range(len(collection))}
    if not all(key in place for key in saved.keys):
        raise UserError(f"the embeddings name images that {collection.name} does not have; write them again")
    ids = torch.tensor([place[key] for key in saved.keys])
    return Features(torch.from_numpy(saved.features), None, ids)


def _rows(
    queries: Source, asked: Features, collection: Source, there: Features, found: Found, labels: list[str | None]
) -> list[NeighborRow]:
    """The result by names; w is Eq. 4 on these features, scaled so that the nearest has 1."""
    from snclr.evaluate.neighbors import Neighbor, NeighborRow, class_names

    ids = there.ids[found.index.clamp(min=0)]  # (n, k) numbers in the collection
    w = _positiveness(found.cosine)
    names = class_names(collection, ids.flatten())
    rows = []
    for number, query in enumerate(asked.ids.tolist()):
        label = labels[query]
        neighbors = []
        for rank, place in enumerate(found.index[number].tolist()):
            if place < 0:
                continue
            index = int(ids[number, rank])
            other = None if names is None else names[number * ids.shape[1] + rank]
            same = None if label is None or other is None else label == other
            cosine = float(found.cosine[number, rank])
            neighbors.append(Neighbor(collection.key(index), index, cosine, float(w[number, rank]), other, same))
        rows.append(NeighborRow(queries.key(query), query, label, neighbors))
    return rows


def _positiveness(cosine: Tensor) -> Tensor:
    """exp(cosine) over its row's largest, which is Eq. 4 with gamma "max"; 0 where there is no neighbour."""
    return (cosine - cosine[:, :1].clamp(min=-1)).exp()


def _with_paths(row: NeighborRow, collection: Source) -> dict[str, Any]:
    from snclr.evaluate.queries import file_of

    entry = asdict(row)
    for neighbor in entry["neighbors"]:
        path = file_of(collection, neighbor["index"])
        neighbor["path"] = None if path is None else str(path)
    return entry


def _draw(rows: list[NeighborRow], queries: Source, collection: Source, path: Path) -> str:
    from snclr.report.neighbor_figure import draw_neighbors

    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"most similar in {collection.name}"
    draw_neighbors(rows[:MOST_ROWS], queries.load, collection.load, path, title=title, show="cosine")
    return str(path)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument("image", metavar="IMAGE", help="an image file, a folder of them, or a key of the collection")
    parser.add_argument(
        "--data", help="the collection: a folder, a list, shards, a data set by name (default: the run's own)"
    )
    parser.add_argument("--k", type=int, default=10, metavar="N", help="similar images to find")
    parser.add_argument("--index", choices=("auto", "exact", "faiss"), default="auto", help="how to search")
    parser.add_argument("--embeddings", metavar="FILE", help="the collection's features, from snclr embed")
    parser.add_argument(
        "--split", help="which part, where the collection has parts (default: train, or that of --embeddings)"
    )
    parser.add_argument("--out", metavar="PNG", help=f"draw the result (the first {MOST_ROWS} queries)")
    add_compute_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    done = search(
        a.run, a.image, data=a.data, k=a.k, index=a.index, embeddings=a.embeddings, split=a.split, out=a.out,
        workers=a.workers, device=a.device, devices=a.devices, nodes=a.nodes, cache=not a.no_cache, quiet=a.json,
    )  # fmt: skip
    return finish(done, a, _show)


def _show(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(done))
        return
    for row in done["queries"]:
        print(row["key"])
        for neighbor in row["neighbors"]:
            label = f"  [{neighbor['label']}]" if neighbor["label"] else ""
            print(f"  {neighbor['cosine']:7.4f}  {neighbor['path'] or neighbor['key']}{label}")
    print(f"in {done['collection']}, by cosine of the encoder's features, {done['method']}")
    if done["skipped"]:
        first = done["skipped"][0]
        print(f"{len(done['skipped'])} images could not be read, e.g. {first['key']}: {first['reason']}")
    if done["figure"]:
        print(f"wrote {done['figure']}")
