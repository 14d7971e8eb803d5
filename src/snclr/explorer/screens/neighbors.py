"""The screen Neighbors: the nearest images of a query, with their part in the loss."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.retrieval.gallery import Gallery
from snclr.evaluation.retrieval.space import weigh_by_cosine
from snclr.explorer.explorer import Explorer, ImageRef
from snclr.explorer.opened_run import Matrix, Network, OpenedRun, Space
from snclr.methods.common import kernels

MAX_K = 200
NETWORKS: dict[Space, Network] = {"projection": "y2", "encoder": "encoder"}
"""The network whose features rank images in a space."""


def galleries(explorer: Explorer, run: OpenedRun) -> list[dict[str, Any]]:
    """Return the galleries of a run as JSON values."""
    found = [{"name": each.name, "title": each.title, "count": len(each.dataset)} for each in explorer.sets.values()]
    queue = run.queue()
    if queue is not None and explorer.trained_on is not None:
        found.append({"name": "queue", "title": "the run's queue", "count": len(queue.ids)})
    return found


def neighbors(
    explorer: Explorer, run: OpenedRun, ref: ImageRef, *, gallery: str = "images", space: Space = "encoder", k: int = 24
) -> dict[str, Any]:
    """Return the k nearest images of a query by exact search, with cosine, w, p and share of the loss.

    w, p and share are those of `snclr explain`: they exist for the run's K nearest projections. A folder without heads
    and runs of other methods have only w, relative to the nearest.
    """
    if not 1 <= k <= MAX_K:
        raise UserError(f"k is {k}; give 1 to {MAX_K}")
    if space not in run.spaces:
        raise UserError(f"{run.title} has no {space} features; choose from {', '.join(run.spaces)}")
    candidates, set_name = _gallery(explorer, run, gallery, space)
    own_id = ref.index if ref.set == set_name else -1
    query = query_features(explorer, run, NETWORKS[space], ref)
    started = time.perf_counter()
    unit = F.normalize(query, dim=1)
    own = (candidates.ids == own_id).nonzero()[:, 0]
    cosine, rows = kernels.topk(unit, candidates.features, k, exclude=(torch.zeros_like(own), own))
    milliseconds = 1000 * (time.perf_counter() - started)
    known = rows[0] >= 0
    cosines, positions = cosine[0][known], rows[0][known]
    terms, loss, note = _loss_terms(explorer, run, ref, gallery, own_id)
    found = []
    query_label = explorer.describe(ref)["label"]
    near = candidates.features[positions][None]
    weights = None if terms else weigh_by_cosine(unit, near, torch.ones(near.shape[:2], dtype=torch.bool))[0].tolist()
    by_id: dict[int, list[dict[str, float]]] = {}
    for term in terms[1:]:
        by_id.setdefault(int(term["id"]), []).append(term)
    for rank, (value, position) in enumerate(zip(cosines.tolist(), positions.tolist(), strict=True)):
        image = explorer.describe(ImageRef(set_name, int(candidates.ids[position])))
        of_image = by_id.get(image["id"], [])  # a queue may hold an image twice
        term = of_image.pop(0) if of_image else {}
        found.append(
            {
                **image,
                "rank": rank + 1,
                "cosine": value,
                "w": term.get("w") if weights is None else weights[rank],
                "p": term.get("p"),
                "share": term.get("share"),
                "same": None if query_label is None or image["label"] is None else query_label == image["label"],
            }
        )
    same = [each["same"] for each in found if each["same"] is not None]
    return {
        "query": explorer.describe(ref),
        "gallery": gallery,
        "space": space,
        "k": k,
        "run": run.name,
        "neighbors": found,
        "purity": sum(same) / len(same) if same else None,
        "search": f"Exact search over {len(candidates.ids):,} images",
        "milliseconds": round(milliseconds, 1),
        "loss": loss,
        "own": terms[0] if terms else None,
        "loss_neighbors": run.neighbors,
        "note": note,
    }


def query_features(explorer: Explorer, run: OpenedRun, network: Network, ref: ImageRef) -> Tensor:
    """Return the raw features (1, D) of a query: from the features of its set, or by encoding it."""
    if ref.set != "queries":
        matrix: Matrix = explorer.features(run, network, ref.set)
        row = matrix.row_of.get(ref.index)
        if row is None:
            raise UserError(f"{explorer.title(ref)} could not be read, so it has no features")
        raw = matrix.raw if matrix.raw is not None else matrix.features
        return raw[row : row + 1]
    return run.encode(network, run.center_view(explorer.load(ref)))


def _gallery(explorer: Explorer, run: OpenedRun, gallery: str, space: Space) -> tuple[Matrix, str]:
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
) -> tuple[list[dict[str, Any]], float | None, str | None]:
    """Return the terms of the loss (y2 first), the loss, and a note on how to read them."""
    if run.criterion is None:
        method = "an encoder without heads" if run.config is None else f"method {run.config.method}"
        return (
            [],
            None,
            f"{method.capitalize()}: w by Eq. 4 on the encoder's features; p and share exist for SNCLR runs only",
        )
    projections, set_name = _gallery(explorer, run, gallery, "projection")
    network = run.search_network
    searched = run.queue(network) if gallery == "queue" else explorer.features(run, network, gallery)
    assert searched is not None
    candidates = Gallery(
        searched.features, projections.ids, explorer.sets[set_name].dataset, gallery, projections=projections.features
    )
    y1, y2, search = (query_features(explorer, run, each, ref) for each in ("y1", "y2", network))
    loss, terms = run.explain(y1, y2, search, candidates, own_id)
    rows = [{"id": -1 if t.index is None else t.index, "w": t.w, "p": t.p, "share": t.share} for t in terms]
    s = run.criterion.config
    note = (
        f"w, p and share for the K = {s.neighbors} nearest "
        f"{'projections' if network == 'y2' else 'features of the target encoder'}, as in snclr explain: "
        f"τ {s.temperature:g}, γ {s.gamma}, {s.loss_form} form, center crop as both views"
    )
    return rows, loss, note
