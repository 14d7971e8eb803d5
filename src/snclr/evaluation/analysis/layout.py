"""2-D layouts of features: PCA, UMAP (umap-learn), alignment of two layouts, and how faithful a layout is."""

import importlib.util
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, overlap

Points = npt.NDArray[np.float32]

UMAP_NEIGHBORS = 15
_ROWS = 512


class Layout(NamedTuple):
    """Points (n, 2) and a description of how they were computed."""

    points: Points
    description: str
    explained: tuple[float, float] = (0.0, 0.0)
    """Share of the variance of each component of a PCA; 0 for UMAP."""


def pca(features: Tensor) -> Layout:
    """Project L2-normalized features (n, D) on their first two principal components.

    Deterministic: the largest weight of each component is positive. Sums are in the precision of the features.

    >>> pca(torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0]])).points.shape
    (3, 2)
    """
    unit = F.normalize(features, dim=1)
    centered = F.pad(unit - unit.mean(dim=0), (0, max(0, 2 - unit.shape[1])))
    values, vectors = torch.linalg.eigh((centered.T @ centered).double())
    components = vectors[:, [-1, -2]]
    largest = components.gather(0, components.abs().argmax(dim=0, keepdim=True))
    components = torch.where(largest < 0, -components, components)
    first, second = (values[[-1, -2]].clamp(min=0) / values.sum().clamp(min=1e-20)).tolist()
    points = (centered @ components.to(centered)).float().numpy()
    description = f"PCA: the two components explain {first:.1%} and {second:.1%} of the variance"
    return Layout(points, description, (first, second))


def umap_installed() -> bool:
    """Return whether umap-learn can be imported."""
    return importlib.util.find_spec("umap") is not None


def umap_layout(features: Tensor, graph: Graph) -> Layout:
    """Lay out features (n, D) by UMAP with 15 exact neighbors, from `graph`; the seed is 0."""
    if not umap_installed():
        raise UserError("UMAP needs umap-learn: pip install 'snclr[explore]'; the PCA layout needs nothing")
    neighbors = min(UMAP_NEIGHBORS, len(features) - 1, graph.index.shape[1] + 1)
    if neighbors < 2:
        raise UserError(f"UMAP needs at least three images, not {len(features)}")
    unit = F.normalize(features.float(), dim=1).numpy()
    # umap counts the point itself as its first neighbor, at distance 0.
    index = torch.cat([torch.arange(len(unit))[:, None], graph.index[:, : neighbors - 1]], dim=1).numpy()
    distance = F.pad((1 - graph.cosine[:, : neighbors - 1]).clamp(min=0), (1, 0)).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # umap warns that a seed makes it single-threaded
        import umap

        model: Any = umap.UMAP(
            n_neighbors=neighbors, metric="cosine", random_state=0, n_jobs=1, min_dist=0.1,
            init="pca", precomputed_knn=(index, distance, None),
            force_approximation_algorithm=True,
        )  # fmt: skip
        points = np.asarray(model.fit_transform(unit), np.float32)
    points -= points.mean(axis=0)
    return Layout(points, f"UMAP: {neighbors} exact neighbors by cosine, min_dist 0.1, seed 0")


def align(points: Points, reference: Points) -> Points:
    """Rotate, reflect, scale and move `points` (n, 2) to lie as close as possible to `reference` (n, 2) (Procrustes).

    >>> square = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)
    >>> turned = 3 * square[:, ::-1] + 5
    >>> bool(np.allclose(align(turned, square), square, atol=1e-5))
    True
    """
    from scipy.linalg import orthogonal_procrustes

    center, target = points.mean(axis=0), reference.mean(axis=0)
    moved, goal = (points - center).astype(np.float64), (reference - target).astype(np.float64)
    rotation, scale = orthogonal_procrustes(moved, goal)
    return np.asarray(scale / max(float((moved**2).sum()), 1e-20) * moved @ rotation + target, np.float32)


def kept_neighbors(index: Tensor, points: Points) -> Tensor:
    """Return the share of each image's true neighbors (n, k) that are among its k nearest points on the map (n,).

    With a low share, the map is wrong at this image: its true neighbors are elsewhere.

    >>> line = np.array([[0, 0], [1, 0], [2.5, 0]], np.float32)
    >>> kept_neighbors(torch.tensor([[1], [2], [0]]), line).tolist()
    [1.0, 0.0, 0.0]
    """
    return overlap(index, _nearest_points(points, torch.arange(len(points)), index.shape[1]))


def trustworthiness(features: Tensor, points: Points, k: int, rows: Tensor) -> Tensor:
    """Return the trustworthiness of a layout at some of its points (Venna and Kaski, 2001): one value per row.

    1 if the k nearest points on the map are true neighbors; each that is not is counted by its true rank:
    1 − 2 / (k (2n − 3k − 1)) Σ max(0, rank − k).
    """
    unit = F.normalize(features.float(), dim=1)
    n = len(unit)
    assert 2 * n - 3 * k - 1 > 0
    excess = []
    for own, near in zip(torch.split(rows, _ROWS), torch.split(_nearest_points(points, rows, k), _ROWS), strict=True):
        cosine = unit[own] @ unit.T
        cosine.scatter_(1, own[:, None], torch.inf)  # the point itself has rank 0
        of_near = cosine.gather(1, near)
        rank = torch.stack([(cosine > column[:, None]).sum(dim=1) for column in of_near.unbind(dim=1)], dim=1)
        excess.append((rank - k).clamp(min=0).sum(dim=1))
    return 1 - torch.cat(excess).float() * (2.0 / (k * (2 * n - 3 * k - 1)))


def _nearest_points(points: Points, rows: Tensor, k: int) -> Tensor:
    """Return the k points (rows, k) that are nearest to each of some points on the map, without the point itself."""
    from scipy.spatial import cKDTree

    _, near = cKDTree(points).query(points[rows.numpy()], k=k + 1)
    near = torch.from_numpy(np.atleast_2d(near))
    own = near == rows[:, None]
    own[~own.any(dim=1), -1] = True  # of more than k equal points, the point itself may be missing
    return near[~own].view(len(rows), k)
