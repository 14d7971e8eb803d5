"""The most similar images of a collection: exact, or by a faiss index whose recall is measured before it is used."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr import streaming
from snclr.errors import UserError

INDICES = ("auto", "exact", "faiss")
FAISS_FROM = 100_000
"""Images in a collection from which on `auto` considers an index."""
GOOD_RECALL = 0.95
"""More lists are looked at until this share of the true neighbours is found."""
_SAMPLE = 256  # queries the recall is measured on
_POINTS_A_LIST = 39  # faiss wants at least so many points to train a list
_TRAIN_POINTS_A_LIST = 64


@dataclass(frozen=True)
class Found:
    """The k nearest of each query, best first: cosines and indices (n, k), -inf and -1 where there are fewer."""

    cosine: Tensor
    index: Tensor
    method: str
    """How it was searched, in words."""
    recall: float | None
    """Measured share of the true neighbours that were found; None where the search is exact."""


def find_similar(
    queries: Tensor,
    collection: Tensor,
    k: int,
    *,
    index: str = "auto",
    query_ids: Tensor | None = None,
    collection_ids: Tensor | None = None,
) -> Found:
    """The k rows of the collection (m, d) with the largest cosine to each query (n, d); never one of the query's id.

    >>> find_similar(torch.eye(2), torch.tensor([[1.0, 0.2], [0.0, 3.0], [1.0, 1.0]]), 2).index
    tensor([[0, 2],
            [1, 2]])
    """
    check_k(k)
    if queries.shape[1:] != collection.shape[1:]:
        raise UserError(
            f"query features {tuple(queries.shape)} and collection features {tuple(collection.shape)} differ in width; "
            "take both from the same encoder"
        )
    q, c = F.normalize(queries.float(), dim=1), F.normalize(collection.float(), dim=1)
    same = None
    if query_ids is not None and collection_ids is not None:
        same = streaming.matching_pairs(query_ids, collection_ids)
    if choose(index, len(q), len(c)) == "exact":
        cosine, found = streaming.topk(q, c, k, exclude=same)
        return Found(cosine, found, f"exact over {len(c):,} images", None)
    return _by_faiss(q, c, k, same)


def check_k(k: int) -> None:
    """Refuse to look for no images; to be asked before anything is computed, too."""
    if k < 1:
        raise UserError(f"k is {k}; at least one similar image must be asked for")


def choose(index: str, queries: int, images: int) -> str:
    """`exact` or `faiss`: with `auto` an index is built only where it saves work.

    Building one compares each image with every list centre. Fewer queries than lists are cheaper compared with all.

    >>> choose("auto", 1, 1_000_000)
    'exact'
    """
    if index not in INDICES:
        raise UserError(f"index must be one of {', '.join(INDICES)}, not {index!r}")
    installed = importlib.util.find_spec("faiss") is not None
    if index == "faiss" and not installed:
        raise UserError("index faiss needs faiss: pip install 'snclr[faiss]', or search with --index exact")
    pays = images >= FAISS_FROM and queries > list_count(images)
    return index if index != "auto" else "faiss" if pays and installed else "exact"


def list_count(images: int) -> int:
    """Lists of an index for so many images: 4√n, fewer where they would be nearly empty.

    >>> list_count(1_000_000), list_count(100)
    (4000, 2)
    """
    return max(1, min(round(4 * math.sqrt(images)), images // _POINTS_A_LIST))


def _by_faiss(q: Tensor, c: Tensor, k: int, same: tuple[Tensor, Tensor] | None) -> Found:
    """Inverted lists (IVF): only the lists nearest to a query are looked through."""
    faiss = importlib.import_module("faiss")
    lists = list_count(len(c))
    quantizer = faiss.IndexFlatIP(c.shape[1])
    ivf = faiss.IndexIVFFlat(quantizer, c.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    ivf.cp.max_points_per_centroid = _TRAIN_POINTS_A_LIST
    points = c.contiguous().numpy()
    ivf.train(points)
    ivf.add(points)
    extra = 0 if same is None or len(same[0]) == 0 else int(torch.bincount(same[0]).max())  # these are taken out again
    sample = torch.arange(0, len(q), -(-len(q) // _SAMPLE))
    pairs = None if same is None else _rows(same, sample)
    truth = streaming.topk(q[sample], c, k, exclude=pairs)[1]
    ivf.nprobe = max(1, lists // 64)
    while True:
        recall = _recall(_search(ivf, q[sample], k, extra, pairs)[1], truth)
        if recall >= GOOD_RECALL or ivf.nprobe >= lists:
            break
        ivf.nprobe = min(lists, 2 * ivf.nprobe)
    cosine, found = _search(ivf, q, k, extra, same)
    method = (
        f"faiss IVF over {len(c):,} images: {ivf.nprobe} of {lists} lists, recall@{k} {recall:.3f} against the exact "
        f"search on {len(sample)} queries"
    )
    return Found(cosine, found, method, recall)


def _search(ivf: Any, q: Tensor, k: int, extra: int, same: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The index's k best without the query's own image: cosines and indices (n, k)."""
    cosine, found = (torch.from_numpy(part) for part in ivf.search(q.contiguous().numpy(), k + extra))
    cosine = cosine.masked_fill(found < 0, -torch.inf)  # fewer points than asked for in the lists it looked at
    if same is not None and extra:
        # At most `extra` a row, so comparing each with each found is small.
        own = torch.full((len(q), extra), -2)
        starts = torch.searchsorted(same[0], torch.arange(len(q)))
        own[same[0], torch.arange(len(same[0])) - starts[same[0]]] = same[1]
        itself = (found[:, :, None] == own[:, None, :]).any(dim=2)
        cosine, found = cosine.masked_fill(itself, -torch.inf), found.masked_fill(itself, -1)
    best, order = cosine.sort(dim=1, descending=True, stable=True)
    return best[:, :k], found.gather(1, order)[:, :k]


def _rows(same: tuple[Tensor, Tensor], sample: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of some rows (sorted), numbered by their place among these."""
    kept = torch.isin(same[0], sample)
    return torch.searchsorted(sample, same[0][kept]), same[1][kept]


def _recall(found: Tensor, truth: Tensor) -> float:
    """Share of the true indices (n, k) that were found; -1 marks where there are none."""
    known = truth >= 0
    hit = (truth[:, :, None] == found[:, None, :]).any(dim=2)
    return float(hit[known].double().mean()) if bool(known.any()) else 1.0
