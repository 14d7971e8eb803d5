"""The screen Neighbors: the nearest images of a query, with their part in the loss."""

import time
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.retrieval.gallery import Gallery, same_class
from snclr.evaluation.retrieval.space import weigh_by_cosine
from snclr.explorer.explorer import Explorer, ImageRef
from snclr.explorer.opened_run import ImageFeatures, OpenedRun, Space
from snclr.methods.common import kernels

MAX_K = 200
NETWORKS = {"projection": "y2", "encoder": "encoder"}
"""The network whose features rank images in a space."""


def galleries(explorer: Explorer, run: OpenedRun) -> list[dict[str, Any]]:
    """Return the galleries of a run as JSON values."""
    found = [{"name": each.name, "title": each.title, "count": len(each.dataset)} for each in explorer.sets.values()]
    queue = run.queue()
    if queue is not None and explorer.trained_on is not None:
        found.append({"name": "queue", "title": "the run's queue", "count": len(queue.ids)})
    return found


def neighbors(
    explorer: Explorer, run: OpenedRun, ref: ImageRef, gallery: str = "images", space: Space | None = None, k: int = 24
) -> dict[str, Any]:
    """Return the k nearest images of a query by exact search, with cosine, w, p and share of the loss.

    w, p and share are those of `snclr explain`: they exist for the run's K nearest projections. A folder without heads
    and runs of other methods have only w, relative to the nearest.
    """
    space = space or run.spaces[0]
    if not 1 <= k <= MAX_K:
        raise UserError(f"k is {k}; give 1 to {MAX_K}")
    if space not in run.spaces:
        raise UserError(f"{run.title} has no {space} features; choose from {', '.join(run.spaces)}")
    candidates, set_name = _gallery(explorer, run, gallery, space)
    own_id = ref.index if ref.set == set_name else -1
    query = F.normalize(query_features(explorer, run, NETWORKS[space], ref), dim=1)
    started = time.perf_counter()
    own = (candidates.ids == own_id).nonzero()[:, 0]
    cosine, rows = kernels.topk(query, candidates.features, k, exclude=(torch.zeros_like(own), own))
    milliseconds = 1000 * (time.perf_counter() - started)
    positions = rows[rows >= 0]
    near = candidates.features[positions][None]
    weights = weigh_by_cosine(query, near, torch.ones(near.shape[:2], dtype=torch.bool))[0].tolist()
    terms, loss, note = _loss_terms(explorer, run, ref, gallery, own_id)
    by_id = defaultdict(list)
    for term in terms[1:]:
        by_id[term["id"]].append(term)
    described = explorer.describe(ref)
    found = []
    for rank, (index, value) in enumerate(zip(candidates.ids[positions].tolist(), cosine[0].tolist(), strict=False)):
        image = explorer.describe(ImageRef(set_name, index))
        # A queue may hold an image twice.
        term = (
            by_id[index].pop(0) if by_id[index] else {"w": None if terms else weights[rank], "p": None, "share": None}
        )
        same = same_class(described["label"], image["label"])
        found.append({**image, **term, "rank": rank + 1, "cosine": value, "same": same})
    return {
        "query": described,
        "neighbors": found,
        "search": f"Exact search over {len(candidates.ids):,} images",
        "milliseconds": round(milliseconds, 1),
        "loss": loss,
        "own": terms[0] if terms else None,
        "loss_neighbors": None if run.criterion is None else run.criterion.config.neighbors,
        "note": note,
    }


def query_features(explorer: Explorer, run: OpenedRun, network: str, ref: ImageRef) -> Tensor:
    """Return the raw features (1, D) of a query: from the features of its set, or by encoding it."""
    if ref.set == "queries":
        return run.encode(network, run.center_view(explorer.load(ref)))
    matrix = explorer.features(run, network, ref.set)
    row = matrix.row_of.get(ref.index)
    if row is None:
        raise UserError(f"{explorer.title(ref)} could not be read, so it has no features")
    raw = matrix.features if matrix.raw is None else matrix.raw
    return raw[row : row + 1]


def _gallery(explorer: Explorer, run: OpenedRun, gallery: str, space: Space) -> tuple[ImageFeatures, str]:
    """Return the features of a gallery and the image set that its ids refer to."""
    if gallery == "queue":
        queue = run.queue()
        if queue is None or explorer.trained_on is None or space != "projection":
            raise UserError("the queue holds projections; rank by projection, or choose another gallery")
        return queue, explorer.trained_on
    if gallery not in explorer.sets:
        raise UserError(f"there is no gallery {gallery!r}; choose from {', '.join(explorer.sets)} or queue")
    return explorer.features(run, NETWORKS[space], gallery), gallery


def _loss_terms(
    explorer: Explorer, run: OpenedRun, ref: ImageRef, gallery: str, own_id: int
) -> tuple[list[dict[str, Any]], float | None, str]:
    """Return the terms of the loss (y2 first), the loss, and a note on how to read them."""
    if run.criterion is None:
        method = "An encoder without heads" if run.config is None else f"Method {run.config.method}"
        note = f"{method}: w by Eq. 4 on the encoder's features; p and share exist for SNCLR runs only"
        return [], None, note
    projections, set_name = _gallery(explorer, run, gallery, "projection")
    searched = run.queue(run.searched) if gallery == "queue" else explorer.features(run, run.searched, gallery)
    assert searched is not None
    candidates = Gallery(
        searched.features, projections.ids, explorer.sets[set_name].dataset, gallery, projections=projections.features
    )
    y1, y2, search = (query_features(explorer, run, each, ref) for each in ("y1", "y2", run.searched))
    loss, terms = run.explain(y1, y2, search, candidates, own_id)
    rows = [{"id": -1 if t.index is None else t.index, "w": t.w, "p": t.p, "share": t.share} for t in terms]
    s = run.criterion.config
    note = (
        f"w, p and share for the K = {s.neighbors} nearest "
        f"{'projections' if run.searched == 'y2' else 'features of the target encoder'}, as in snclr explain: "
        f"τ {s.temperature:g}, γ {s.gamma}, {s.loss_form} form, center crop as both views"
    )
    gate = run.method.gate
    closed = None if gate is None or s.sides == "neither" else gate.closed_note()
    return rows, loss, f"{note}; {closed}" if closed else note
