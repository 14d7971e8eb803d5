"""The screen Map: 2-D layouts and one value per image to color it by. All arrays are float32 in the order of `ids`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, hubness, overlap, purity, reciprocity
from snclr.evaluation.analysis.layout import (
    Layout,
    kept_neighbors,
    pca,
    trustworthiness,
    umap_installed,
    umap_layout,
)
from snclr.explorer.explorer import Explorer
from snclr.explorer.jobs import Job
from snclr.explorer.opened_run import OpenedRun
from snclr.explorer.screens.timeline import step_graph

Array = npt.NDArray[np.float32]
LayoutName = Literal["pca", "umap"]
FIDELITY_K = 15
"""Neighbors by which the faithfulness of a map is measured."""
_TRUST_SAMPLE = 1_000
_CLUSTER_POINTS = 20_000  # rows that the cluster centers are fitted on


def describe(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return what the screen offers: number of points, layouts and color modes. Raise Pending before features exist."""
    features = explorer.features(run, "encoder")
    labeled = explorer.images.classes is not None
    modes = [
        ("class", "Class", labeled),
        ("cluster", "Cluster", True),
        ("purity", "Neighbor purity", labeled),
        ("reciprocity", "Mutual neighbors", True),
        ("hubness", "Hubness", True),
        ("loss", "Loss", run.criterion is not None),
        ("change", "Change since the checkpoint before", len(run.kept_encoders()) > 1),
        ("kept", "Kept by the map", True),
    ]
    return {
        "count": len(features.ids),
        "classes": explorer.images.classes,
        "layouts": ["pca", "umap"] if umap_installed() else ["pca"],
        "modes": [{"name": name, "title": title} for name, title, offered in modes if offered],
        "umap_missing": not umap_installed(),
    }


def ids(explorer: Explorer, run: OpenedRun) -> Array:
    """Return the image id of each point (n,)."""
    return explorer.features(run, "encoder").ids.numpy().astype(np.float32)


def layout(explorer: Explorer, run: OpenedRun, name: LayoutName) -> Layout:
    """Return a layout, or raise Pending."""
    if name == "pca":
        return explorer.jobs.get(f"pca/{run.name}", "PCA", lambda job: pca(explorer.features(run, "encoder").features))
    if name != "umap":
        raise UserError(f"there is no layout {name!r}; choose pca or umap")
    if not umap_installed():
        raise UserError("UMAP needs umap-learn: pip install 'snclr[explore]'")

    def compute(job: Job) -> Layout:
        features, graph = explorer.features(run, "encoder").features, explorer.graph(run)
        # umap reports no progress; the time is estimated from the number of images, and the bar waits at 95 %.
        expected, start = 12 + len(features) / 350, time.monotonic()

        def tick() -> None:
            job.done, job.total = min(95, round(100 * (time.monotonic() - start) / expected)), 100

        return umap_layout(features, graph, tick)

    title = f"UMAP of {len(explorer.images.dataset):,} images"
    return explorer.jobs.get(f"umap/{run.name}", title, compute, lane="slow")


def fidelity(explorer: Explorer, run: OpenedRun, name: LayoutName) -> dict[str, Any]:
    """Return how faithful a layout is: the mean share of kept neighbors and its trustworthiness on a sample."""
    kept = values(explorer, run, "kept", name)

    def compute(job: Job) -> float:
        features = explorer.features(run, "encoder").features
        points = layout(explorer, run, name).points
        rows = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:_TRUST_SAMPLE]
        k = min(FIDELITY_K, (2 * len(features) - 2) // 3 - 1)
        return float(trustworthiness(features, points, k, rows).mean()) if k > 0 else float("nan")

    trust = explorer.jobs.get(f"trust/{run.name}/{name}", "trustworthiness of the map", compute)
    return {
        "kept": float(kept.mean()),
        "trustworthiness": None if np.isnan(trust) else trust,
        "k": FIDELITY_K,
        "sample": min(_TRUST_SAMPLE, len(kept)),
        "description": layout(explorer, run, name).description,
    }


def values(explorer: Explorer, run: OpenedRun, mode: str, name: LayoutName = "pca") -> Array:
    """Return one value per image (n,), NaN if unknown: class and cluster are numbers, all others a quantity."""
    features = explorer.features(run, "encoder")
    labels = explorer.labels(features.ids)
    if mode == "class":
        if labels is None:
            raise UserError("the images have no labels")
        return labels.float().where(labels >= 0, torch.nan).numpy()
    jobs: dict[str, tuple[str, Callable[[Job], Tensor]]] = {
        "cluster": ("clusters", lambda job: _clusters(features.features, explorer)),
        "purity": ("neighbor purity", lambda job: _purity(explorer.graph(run), labels)),
        "reciprocity": ("mutual neighbors", lambda job: reciprocity(explorer.graph(run).index)),
        "hubness": ("hubness", lambda job: hubness(explorer.graph(run).index).float()),
        "loss": ("loss of each image", lambda job: _losses(explorer, run, job)),
        "change": ("change between checkpoints", lambda job: _change(explorer, run)),
        "kept": ("neighbors kept by the map", lambda job: _kept(explorer, run, name)),
    }
    if mode not in jobs:
        raise UserError(f"there is no color mode {mode!r}; choose from class, {', '.join(jobs)}")
    title, compute = jobs[mode]
    suffix = f"/{name}" if mode == "kept" else ""
    if mode == "kept" and name == "umap":
        layout(explorer, run, "umap")  # on its own lane
    result: Tensor = explorer.jobs.get(f"{mode}/{run.name}{suffix}", title, compute)
    return result.float().numpy()


def true_neighbors(explorer: Explorer, run: OpenedRun, row: int) -> list[int]:
    """Return the points that are nearest to a point in feature space."""
    index = explorer.graph(run).index
    if not 0 <= row < len(index):
        raise UserError(f"there is no point {row}")
    return [n for n in index[row, :FIDELITY_K].tolist() if n >= 0]


def _purity(graph: Graph, labels: Tensor | None) -> Tensor:
    if labels is None:
        raise UserError("purity needs labels")
    return purity(graph.index, labels)


def _losses(explorer: Explorer, run: OpenedRun, job: Job) -> Tensor:
    """Return the loss of each point; NaN for images without projections."""
    y2, y1, search = (explorer.features(run, network) for network in ("y2", "y1", run.search_network))
    return _of_points(explorer, run, y2.ids, run.losses(y1, y2, search, job.report))


def _change(explorer: Explorer, run: OpenedRun) -> Tensor:
    """Return 1 − overlap@k with the neighbors of the kept encoder before the last, on the sampled images."""
    steps = [step for step, _ in run.kept_encoders()]
    if len(steps) < 2:
        raise UserError("change needs two kept checkpoints; train with --keep-encoders 12")
    before, after = (step_graph(explorer, run, step) for step in steps[-2:])
    return _of_points(explorer, run, after.ids, 1 - overlap(after.graph.index, before.graph.index))


def _of_points(explorer: Explorer, run: OpenedRun, ids: Tensor, values: Tensor) -> Tensor:
    """Return the value of each point; `values` (m,) are those of the images `ids` (m,), other points have NaN."""
    result = torch.full((len(explorer.images.dataset),), torch.nan)
    result[ids] = values
    return result[explorer.features(run, "encoder").ids]


def _kept(explorer: Explorer, run: OpenedRun, name: LayoutName) -> Tensor:
    return kept_neighbors(explorer.graph(run).index[:, :FIDELITY_K], layout(explorer, run, name).points)


def _clusters(features: Tensor, explorer: Explorer) -> Tensor:
    """Return k-means clusters, numbered by size; as many as classes, else √(n/2) between 4 and 24."""
    classes = explorer.images.classes
    k = len(classes) if classes is not None and len(classes) <= 24 else round((len(features) / 2) ** 0.5)
    return k_means(features, max(2, min(24, k, len(features) - 1)))


def k_means(features: Tensor, k: int) -> Tensor:
    """Cluster normalized features (n, D): cluster numbers (n,), 0 is the largest. Centers are fitted on a sample.

    >>> k_means(torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0]]), 2).tolist()
    [0, 0, 1]
    """
    from scipy.cluster.vq import kmeans2

    points = features[torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:_CLUSTER_POINTS]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty cluster, if there are fewer different images than clusters
        centers, _ = kmeans2(points.numpy(), k, minit="++", seed=0)
    clusters = torch.cdist(features, torch.from_numpy(centers).to(features)).argmin(dim=1)
    order = torch.bincount(clusters, minlength=k).argsort(descending=True, stable=True)
    return order.argsort()[clusters]
