"""The screen Map: 2-D layouts and one value per image to color it by. All arrays are float32 in the order of `ids`."""

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.analysis.graph import OnProgress, hubness, overlap, purity, reciprocity
from snclr.evaluation.analysis.layout import Layout, kept_neighbors, pca, trustworthiness, umap_installed, umap_layout
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


class Mode(NamedTuple):
    """A color mode of the map: its name on the page, and how its values (n,) are computed."""

    title: str
    job: str
    """Title of the job; empty: computed at once."""
    missing: str
    """What it needs and this run or its images do not have; empty if it is offered."""
    compute: Callable[[OnProgress], Tensor]


def color_modes(explorer: Explorer, run: OpenedRun, layout: LayoutName = "pca") -> dict[str, Mode]:
    """Return the color modes by name. Raise Pending before features exist."""
    features = explorer.features(run, "encoder")
    labels = explorer.labels(features.ids)
    no_labels = "labels" if explorer.images.classes is None else ""
    no_steps = "two kept checkpoints; train with --keep-encoders 12" if len(run.kept_encoders()) < 2 else ""
    no_loss = "a run of SNCLR" if run.criterion is None else ""

    def near() -> Tensor:
        return explorer.graph(run).index

    return {
        "class": Mode("Class", "", no_labels, lambda report: labels.float().where(labels >= 0, torch.nan)),
        "cluster": Mode("Cluster", "clusters", "", lambda report: _clusters(features.features, explorer)),
        "purity": Mode("Neighbor purity", "neighbor purity", no_labels, lambda report: purity(near(), labels)),
        "reciprocity": Mode("Mutual neighbors", "mutual neighbors", "", lambda report: reciprocity(near())),
        "hubness": Mode("Hubness", "hubness", "", lambda report: hubness(near())),
        "loss": Mode("Loss", "loss of each image", no_loss, lambda report: _losses(explorer, run, report)),
        "change": Mode(
            "Change since the checkpoint before", "change between checkpoints", no_steps,
            lambda report: _change(explorer, run),
        ),
        "kept": Mode(
            "Kept by the map", "neighbors kept by the map", "",
            lambda report: kept_neighbors(near()[:, :FIDELITY_K], find_layout(explorer, run, layout).points),
        ),
    }  # fmt: skip


def describe(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return what the screen offers: number of points, layouts and color modes. Raise Pending before features exist."""
    modes = color_modes(explorer, run)
    return {
        "count": len(explorer.features(run, "encoder").ids),
        "layouts": ["pca", "umap"] if umap_installed() else ["pca"],
        "modes": [{"name": name, "title": mode.title} for name, mode in modes.items() if not mode.missing],
    }


def ids(explorer: Explorer, run: OpenedRun) -> Array:
    """Return the image id of each point (n,)."""
    return explorer.features(run, "encoder").ids.numpy().astype(np.float32)


def find_layout(explorer: Explorer, run: OpenedRun, name: LayoutName) -> Layout:
    """Return a layout, or raise Pending."""
    if name == "pca":
        return explorer.jobs.get(f"pca/{run.name}", "PCA", lambda job: pca(explorer.features(run, "encoder").features))
    if name != "umap":
        raise UserError(f"there is no layout {name!r}; choose pca or umap")

    def compute(job: Job) -> Layout:
        features, graph = explorer.features(run, "encoder").features, explorer.graph(run)
        # umap reports no progress; the time is estimated from the number of images, and the bar waits at 95 %.
        expected, start = 12 + len(features) / 350, time.monotonic()
        job.estimate = lambda: min(95, round(100 * (time.monotonic() - start) / expected))
        return umap_layout(features, graph)

    title = f"UMAP of {len(explorer.images.dataset):,} images"
    return explorer.jobs.get(f"umap/{run.name}", title, compute, lane="slow")


def points(explorer: Explorer, run: OpenedRun, layout: LayoutName = "pca") -> Array:
    """Return the points of a layout (n, 2)."""
    return find_layout(explorer, run, layout).points


def fidelity(explorer: Explorer, run: OpenedRun, layout: LayoutName = "pca") -> dict[str, Any]:
    """Return how faithful a layout is: the mean share of kept neighbors and its trustworthiness on a sample."""
    kept = values(explorer, run, "kept", layout)
    found = find_layout(explorer, run, layout)

    def compute(job: Job) -> float:
        features = explorer.features(run, "encoder").features
        rows = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:_TRUST_SAMPLE]
        k = min(FIDELITY_K, (2 * len(features) - 2) // 3 - 1)
        return float(trustworthiness(features, found.points, k, rows).mean()) if k > 0 else float("nan")

    trust = explorer.jobs.get(f"trust/{run.name}/{layout}", "trustworthiness of the map", compute)
    return {
        "kept": float(kept.mean()),
        "trustworthiness": None if np.isnan(trust) else trust,
        "k": FIDELITY_K,
        "sample": min(_TRUST_SAMPLE, len(kept)),
        "description": found.description,
    }


def values(explorer: Explorer, run: OpenedRun, mode: str = "class", layout: LayoutName = "pca") -> Array:
    """Return one value per image (n,), NaN if unknown: class and cluster are numbers, all others a quantity."""
    modes = color_modes(explorer, run, layout)
    if mode not in modes:
        raise UserError(f"there is no color mode {mode!r}; choose from {', '.join(modes)}")
    chosen = modes[mode]
    if chosen.missing:
        raise UserError(f"this color needs {chosen.missing}")
    if mode == "kept" and layout == "umap":
        find_layout(explorer, run, "umap")  # on its own lane
    key = f"{mode}/{run.name}" + (f"/{layout}" if mode == "kept" else "")
    result: Tensor = (
        explorer.jobs.get(key, chosen.job, lambda job: chosen.compute(job.report))
        if chosen.job
        else chosen.compute(lambda done, total: None)
    )
    return result.float().numpy()


def true_neighbors(explorer: Explorer, run: OpenedRun, row: int = -1) -> list[int]:
    """Return the points that are nearest to a point in feature space."""
    index = explorer.graph(run).index
    if not 0 <= row < len(index):
        raise UserError(f"there is no point {row}")
    return [n for n in index[row, :FIDELITY_K].tolist() if n >= 0]


def _losses(explorer: Explorer, run: OpenedRun, report: OnProgress) -> Tensor:
    """Return the loss of each point; NaN for images without projections."""
    y2, y1, search = (explorer.features(run, network) for network in ("y2", "y1", run.searched))
    return _of_points(explorer, run, y2.ids, run.losses(y1, y2, search, report))


def _change(explorer: Explorer, run: OpenedRun) -> Tensor:
    """Return 1 − overlap@k with the neighbors of the kept encoder before the last, on the sampled images."""
    before, after = (step_graph(explorer, run, step) for step, _ in run.kept_encoders()[-2:])
    return _of_points(explorer, run, after.ids, 1 - overlap(after.graph.index, before.graph.index))


def _of_points(explorer: Explorer, run: OpenedRun, ids: Tensor, values: Tensor) -> Tensor:
    """Return the value of each point; `values` (m,) are those of the images `ids` (m,), other points have NaN."""
    result = torch.full((len(explorer.images.dataset),), torch.nan)
    result[ids] = values
    return result[explorer.features(run, "encoder").ids]


def _clusters(features: Tensor, explorer: Explorer) -> Tensor:
    """Return k-means clusters, numbered by size; as many as classes, else √(n/2) between 2 and 24."""
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
