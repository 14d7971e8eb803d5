"""Cosine search: exact, or with a faiss index whose recall is measured before it is used."""

import importlib
import importlib.util
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.errors import UserError, count
from snclr.methods.common import kernels

INDICES = ("auto", "exact", "faiss")
FAISS_FROM = 100_000
"""Gallery size from which `auto` considers an index."""
GOOD_RECALL = 0.95
"""nprobe is doubled until this recall is reached."""
_SAMPLE = 256  # queries the recall is measured on
_POINTS_PER_LIST = 39  # the minimum faiss recommends to train a list
_TRAIN_POINTS_PER_LIST = 64


@dataclass(frozen=True)
class Hits:
    """The k nearest gallery rows of each query, best first: (n, k), padded with index -1 and cosine -inf."""

    cosine: Tensor
    index: Tensor
    method: str
    """How the gallery was searched."""
    recall: float | None
    """Measured recall of an approximate search; None if the search is exact."""


def find_similar(
    queries: Tensor, gallery: Tensor, k: int, *, index: str = "auto", query_ids: Tensor | None = None,
    gallery_ids: Tensor | None = None,
) -> Hits:  # fmt: skip
    """Find the k rows of the gallery (m, D) with the largest cosine to each query (n, D), except those of equal id.

    >>> find_similar(torch.eye(2), torch.tensor([[1.0, 0.2], [0.0, 3.0], [1.0, 1.0]]), 2).index
    tensor([[0, 2],
            [1, 2]])
    """
    q, c = F.normalize(queries.float(), dim=1), F.normalize(gallery.float(), dim=1)
    if query_ids is None or gallery_ids is None:
        query_ids, gallery_ids = torch.full((len(q),), -1), torch.arange(len(c))
    same = kernels.matching_pairs(query_ids, gallery_ids)
    if choose_index(index, len(q), len(c)) == "faiss":
        most = int(torch.bincount(same[0]).max()) if len(same[0]) else 0
        return _search_faiss(q, c, k, query_ids, gallery_ids, extra=most)
    cosine, positions = kernels.topk(q, c, k, exclude=same)
    return Hits(cosine, positions, f"exact over {count(len(c), 'image')}", None)


def choose_index(index: str, queries: int, images: int) -> str:
    """Return "exact" or "faiss"; `auto` builds an index only if that saves work.

    Building an index compares each image with every list center: fewer queries than lists are cheaper without one.

    >>> choose_index("auto", 1, 1_000_000)
    'exact'
    """
    if index not in INDICES:
        raise UserError(f"index must be one of {', '.join(INDICES)}, not {index!r}")
    installed = importlib.util.find_spec("faiss") is not None
    if index == "faiss" and not installed:
        raise UserError("index faiss needs faiss: pip install 'snclr[faiss]', or search with --index exact")
    saves_work = images >= FAISS_FROM and queries > list_count(images)
    return index if index != "auto" else "faiss" if saves_work and installed else "exact"


def list_count(images: int) -> int:
    """Return the number of inverted lists for a gallery: 4√n, or fewer for a small one.

    >>> list_count(1_000_000), list_count(100)
    (4000, 2)
    """
    return max(1, min(round(4 * math.sqrt(images)), images // _POINTS_PER_LIST))


def _search_faiss(q: Tensor, c: Tensor, k: int, query_ids: Tensor, gallery_ids: Tensor, *, extra: int) -> Hits:
    """Search with inverted lists (IVF), increasing nprobe until the measured recall is good.

    Up to `extra` gallery images have the id of a query; so many more are searched, and these are removed.
    """
    faiss = importlib.import_module("faiss")
    lists = list_count(len(c))
    ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(c.shape[1]), c.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    ivf.cp.max_points_per_centroid = _TRAIN_POINTS_PER_LIST
    points = c.contiguous().numpy()
    ivf.train(points)
    ivf.add(points)

    def search(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        cosine, positions = (torch.from_numpy(part) for part in ivf.search(q[rows].contiguous().numpy(), k + extra))
        # -1: the probed lists hold fewer points
        missing = (positions < 0) | (gallery_ids[positions] == query_ids[rows][:, None])
        best, order = cosine.masked_fill(missing, -torch.inf).sort(dim=1, descending=True, stable=True)
        return best[:, :k], positions.masked_fill(missing, -1).gather(1, order)[:, :k]

    sample = torch.arange(0, len(q), -(-len(q) // _SAMPLE))
    truth = kernels.topk(q[sample], c, k, exclude=kernels.matching_pairs(query_ids[sample], gallery_ids))[1]
    known = truth >= 0
    ivf.nprobe = max(1, lists // 64)
    while True:
        found = (truth[:, :, None] == search(sample)[1][:, None, :]).any(dim=2)
        recall = float(found[known].double().mean()) if bool(known.any()) else 1.0
        if recall >= GOOD_RECALL or ivf.nprobe >= lists:
            break
        ivf.nprobe = min(lists, 2 * ivf.nprobe)
    cosine, positions = search(slice(None))
    method = (
        f"faiss IVF over {len(c):,} images: {ivf.nprobe} of {lists} lists, recall@{k} {recall:.3f} against the exact "
        f"search, queries sampled: {len(sample)}"
    )
    return Hits(cosine, positions, method, recall)
