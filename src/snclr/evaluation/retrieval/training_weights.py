"""Neighbors with the weights of training: w is a softmax over the run's K neighbors, even if fewer are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snclr.evaluation.retrieval.gallery import Gallery, Queries, neighbor_rows
from snclr.evaluation.retrieval.results import NeighborRow
from snclr.evaluation.retrieval.space import EmbeddingSpace
from snclr.methods.config import SoftNeighborConfig


def rank_as_trained(queries: Queries, gallery: Gallery, k: int, space: EmbeddingSpace) -> Sequence[NeighborRow]:
    """Return the k nearest gallery images of each query by cosine, ranked by the w that training gives them."""
    config = _weighted_config(space)
    rows, _ = neighbor_rows(queries, gallery, k if config is None else max(k, config.neighbors), weigh=space.weigh)
    return [_keep_nearest(row, k) for row in rows]


def describe_weights(space: EmbeddingSpace) -> str | None:
    """Describe w in words; None if the run's loss has no w, so that cosines should be shown instead."""
    c = _weighted_config(space)
    if c is None:
        return None
    if c.neighbor_weights == "hard":
        return "w is 1 for every neighbor, as in training (--neighbor-weights hard)"
    # The loss raises the weights of gamma "pull" further; `space.weigh` gives those before that.
    gamma = 1.0 if c.gamma == "pull" else c.gamma
    largest = "each image's largest weight is 1" if gamma == "max" else f"divided by gamma = {gamma:g}"
    if c.gamma == "pull":
        largest += ", before the loss raises it (--gamma pull)"
    equal = 1.0 if gamma == "max" else 1 / c.neighbors / gamma
    return (
        f"w is computed as in training: a softmax over the {c.neighbors} nearest neighbors with temperature "
        f"{c.attention_temperature:g}, {largest}. Equal weights would be {equal:.3f}"
    )


def _weighted_config(space: EmbeddingSpace) -> SoftNeighborConfig | None:
    """Return the settings of a loss that weights its neighbors; None for any other."""
    config = None if space.criterion is None else space.criterion.config
    return None if config is None or config.sides in ("negatives", "neither", "other-negatives") else config


def _keep_nearest(row: NeighborRow, k: int) -> NeighborRow:
    """Keep the k neighbors with the highest cosine, ranked by w."""
    kept = sorted(row.neighbors, key=lambda neighbor: -neighbor.cosine)[:k]
    return replace(row, neighbors=sorted(kept, key=lambda neighbor: -neighbor.w))
