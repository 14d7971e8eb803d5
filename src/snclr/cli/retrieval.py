"""Print the results of `snclr embed`, `search`, `neighbors` and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cyclopts import Parameter

from snclr.api.retrieval import embed, explain, neighbors, search
from snclr.cli.flags import Command
from snclr.errors import count
from snclr.evaluation.results import EmbedResult, Explanation, NeighborsResult, SearchResult
from snclr.runtime.progress import print_wrapped

if TYPE_CHECKING:
    from snclr.data.loader import Skip

_EMBED_EXAMPLES = """Examples:
  snclr embed runs/photos --data my-photos/ --out photos.parquet
  snclr embed runs/cifar --data cifar10 --split test --out test.npy --normalize

The suffix of --out selects the format:
  .npy       float32 array (images, features); keys in NAME.keys.json
  .npz       arrays features, keys and labels, and metadata
  .parquet   columns key, label, feature, projection_x, projection_y and
             neighbors, and metadata; needs pip install 'snclr[parquet]'

Features are also cached in RUN/evaluation/features. Repeat the command to continue after a stop.
"""
_SEARCH_EXAMPLES = """Examples:
  snclr search runs/photos cat.jpg --data my-photos/
  snclr search runs/photos cat.jpg --data my-photos/ --k 5 --out similar.png
  snclr embed runs/photos --data my-photos/ --out photos.npy
  snclr search runs/photos new-photos/ --embeddings photos.npy  # uses that file

Similarity is the cosine of the encoder's features of center crops. If the query image is in the collection, it is not
returned; a copy of its file is. IMAGE may also be the key of an image in the collection, e.g. demo/train/12.

--index auto uses faiss (pip install 'snclr[faiss]') only for 100,000 images or more, and with more queries than the
index has lists (4√images); otherwise the search is exact. With faiss, the recall against the exact search is measured
on a sample of the queries and printed.
"""
_NEIGHBORS_EXAMPLES = """Examples:
  snclr neighbors runs/photos                 # neighbors of training images
  snclr neighbors runs/photos --data other-photos/ --rows 8 --k 10
  snclr neighbors runs/photos cat.jpg dog.jpg # neighbors of your images
  snclr neighbors runs/photos cat.jpg --candidates queue      # search the queue
  snclr neighbors runs/photos cat.jpg --candidates my-photos/ # search a folder

Images are compared as in training: the k nearest by their projections (Eq. 3), ranked by their positiveness w (Eq. 4,
with the run's own K, gamma, f1, f2 and temperature). An image is never its own neighbor. If classes are known, frames
are green (same class) or red. Runs of other methods are compared by their encoder's features. The numbers are written
beside the figure, as JSON.
"""
_EXPLAIN_EXAMPLES = """Examples:
  snclr explain runs/photos cat.jpg                         # neighbors: queue
  snclr explain runs/photos cat.jpg --candidates my-photos/ # neighbors: folder
  snclr explain demo-run demo/train/12                      # an image by key

The image's center crop is used as both views. K is that of the run. Columns of the table:
  cosine   similarity to y2, the image's target projection (Eq. 3)
  w        positiveness (Eq. 4) with the settings of the run; 1 for y2 itself
  p        exp(z1·NN/τ), divided by the sum of these K + 1 terms: Eq. 2 for a
           batch of this one image
  share    part of Σ w p, the sum inside the logarithm; for a run with
           --loss-form outside, part of the loss Σ w (−log p)
"""


def show_embed(result: EmbedResult) -> None:
    """Print the written file and the images that could not be read."""
    images = count(result.images, "image")
    length = "of length 1" if result.metadata["normalize"] else "not normalized"
    print(f"wrote {result.file}: {images} × {result.metadata['features']} features, {length}")
    print_wrapped(
        f"images: {result.metadata['data']}, split {result.metadata['split']} (--split selects another)", indent="  "
    )
    if result.keys_file:
        print(f"wrote {result.keys_file}: the key of each image")
    if skipped := result.metadata["skipped"]:
        first, where = f"{skipped[0]['key']}: {skipped[0]['reason']}", result.keys_file or "the file's metadata"
        print_wrapped(f"unreadable images: {len(skipped):,}, left out and listed in {where}, e.g. {first}")


def show_search(result: SearchResult) -> None:
    """Print the similar images of each query."""
    for row in result.queries:
        print(row.key)
        for neighbor in row.neighbors:
            print(f"  {neighbor.cosine:7.4f}  {neighbor.path or neighbor.key}{_tag(neighbor.label)}")
    print_wrapped(f"in {result.collection}, by cosine of the encoder's features, {result.method}")
    _show_skipped(result.skipped)
    if result.figure:
        print(f"wrote {result.figure}")


def show_neighbors(result: NeighborsResult) -> None:
    """Print the neighbors of each given image, the files and the neighbor purity (neighbors of the same class)."""
    complete = len(result.rows) == result.queries  # given images, not a sample of a dataset
    for row in result.rows if complete else ():
        print(row.key + _tag(row.label))
        for neighbor in row.neighbors:
            name = (neighbor.path or neighbor.key) + _tag(neighbor.label)
            weight = "" if result.weights is None else f"w {neighbor.w:.3f}  "
            print(f"  {weight}cosine {neighbor.cosine:7.4f}  {name}")
    print(f"wrote {result.figure}\nwrote {result.table}")  # a path with spaces is not to be broken
    shares = [share for share in result.neighbor_purity if share is not None]
    if shares and result.queries > 1:
        by_position = ", ".join(f"{share:.1%}" for share in shares)
        over = f"over {count(result.queries, 'image')}"
        print_wrapped(f"neighbor purity of the 1st, 2nd, … neighbor, {over}: {by_position}")
        print_wrapped(result.purity_description, indent="  ")
    if result.weights is not None:
        print_wrapped(result.weights, indent="  ")
    _show_skipped(result.skipped)


def _tag(label: str | None) -> str:
    return f"  [{label}]" if label else ""


def _show_skipped(skipped: Sequence[Skip]) -> None:
    if skipped:
        print_wrapped(f"unreadable images: {len(skipped):,}, left out, e.g. {skipped[0].key}: {skipped[0].reason}")


def show_explain(result: Explanation) -> None:
    """Print one line per term of the loss."""
    settings = f"{result.form} form, sides {result.sides}, τ {result.tau:g}, γ {result.gamma}"
    print_wrapped(f"{result.image}: loss {result.loss:.4f} of one direction ({settings})")
    print_wrapped(f"{result.view}\ncandidates: {result.candidates}", indent="  ")
    if result.gate:
        print_wrapped(f"note: {result.gate}; the terms below are those with neighbors")
    print(f"\n{'i':>3} {'cosine':>8} {'w':>8} {'p':>8} {'share':>8}  image")
    for term in result.terms:
        name = (f"{term.key} (y2)" if term.i == 0 else term.key) + _tag(term.label)
        print(f"{term.i:>3} {term.cosine:8.4f} {term.w:8.4f} {term.p:8.4f} {term.share:8.2%}  {name}")
    if len({term.key for term in result.terms}) < len(result.terms):
        print_wrapped("(an image listed twice has features of two epochs in the queue)", indent="  ")
    share = "w p / Σ w p; the loss is −log Σ w p" if result.form == "inside" else "part of the loss, Σ w (−log p)"
    print()
    print_wrapped(f"p: exp(z1·NN/τ), {result.denominator}\nshare: {share}")
    print(f"wrote {result.figure}")


COMMANDS = {
    "embed": Command(embed, show_embed, _EMBED_EXAMPLES),
    "search": Command(search, show_search, _SEARCH_EXAMPLES),
    "neighbors": Command(
        neighbors, show_neighbors, _NEIGHBORS_EXAMPLES, types={"images": list[str]},
        flags={"k": Parameter(alias="--neighbors"), "images": Parameter(name="IMAGE")},
    ),
    "explain": Command(explain, show_explain, _EXPLAIN_EXAMPLES),
}  # fmt: skip
