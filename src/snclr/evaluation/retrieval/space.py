"""The embedding space of a run: the features its images are compared in and how neighbors are weighted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from snclr.checkpoint.run_dir import open_run
from snclr.data.datasets.base import ImageDataset
from snclr.errors import UserError
from snclr.evaluation.features import Features
from snclr.evaluation.session import Session, run_encoder
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.config import SoftNeighborConfig
from snclr.methods.snclr.loss import SoftNeighborLoss, positiveness
from snclr.train.load_run import load_trained_method

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps y1 (n, D), neighbors (n, K, D) and their mask (n, K) to w (n, K)."""


@dataclass(frozen=True)
class EmbeddingSpace:
    """The networks whose features the search (Eq. 3) and the attention (Eq. 4) compare, and how w is computed."""

    search_network: nn.Module
    attention_network: nn.Module | None
    """None: that of the search."""
    role: str
    """Name of `search_network` in the feature cache: y2, target-encoder, key, encoder or checkpoint (the last one's
    encoder)."""
    weigh: Weigh
    queue: NeighborQueue | None
    image_size: int
    description: str
    criterion: SoftNeighborLoss | None = None
    """SNCLR's loss: its settings give w as in training."""
    projection_network: nn.Module | None = None
    """Network of the projections y2 that are weighted; None: they are the features of the search."""

    def features(self, session: Session, dataset: ImageDataset, description: str) -> Features:
        """Extract the features of Eq. 3 of a dataset, or read them from the run's cache."""
        return session.features(
            self.search_network, dataset, image_size=self.image_size, role=self.role, description=description
        )

    def projections(self, session: Session, dataset: ImageDataset, description: str) -> Tensor | None:
        """Return the projections y2 (n, D) of a dataset; None if they are the features of Eq. 3."""
        if self.projection_network is None:
            return None
        return session.features(
            self.projection_network, dataset, image_size=self.image_size, role="y2", description=description
        ).features

    @property
    def weighted_config(self) -> SoftNeighborConfig | None:
        """The settings of a loss in which neighbors are weighted positives; None for any other loss."""
        config = None if self.criterion is None else self.criterion.config
        return None if config is None or config.sides in ("negatives", "neither", "other-negatives") else config

    def describe_weights(self) -> str | None:
        """Describe w in words; None if the run's loss has no w, so that cosines should be shown instead."""
        c = self.weighted_config
        if c is None:
            return None
        if c.neighbor_weights == "hard":
            return "w is 1 for every neighbor, as in training (--neighbor-weights hard)"
        # With gamma "pull", the loss raises the weights; `weigh` returns those before that.
        gamma = 1.0 if c.gamma == "pull" else c.gamma
        largest = "each image's largest weight is 1" if gamma == "max" else f"divided by gamma = {gamma:g}"
        if c.gamma == "pull":
            largest += ", before the loss raises it (--gamma pull)"
        equal = 1.0 if gamma == "max" else 1 / c.neighbors / gamma
        return (
            f"w is computed as in training: a softmax over the {c.neighbors} nearest neighbors with temperature "
            f"{c.attention_temperature:g}, {largest}. Equal weights would be {equal:.3f}"
        )


def encoder_space(run: str | Path) -> EmbeddingSpace:
    """Open the space of the saved encoder's features."""
    encoder, spec = run_encoder(run)
    description = "the encoder's features (there are no projection heads); w by Eq. 4 on the same features"
    return EmbeddingSpace(encoder, None, "encoder", weigh_by_cosine, None, spec.image_size, description)


def open_space(run: str | Path, *, queue: bool = False, device: str = "cpu") -> EmbeddingSpace:
    """Open the space of a run: SNCLR's projections y2 weighted by y1, or the encoder's features of other methods.

    With `queue`, open the space of the features in the method's queue; UserError if it has none.
    """
    if not open_run(run).config.is_file() and not queue:  # an encoder without heads
        return encoder_space(run)
    method, config = load_trained_method(run, torch.device(device))
    criterion = getattr(method, "criterion", None)
    if isinstance(criterion, SoftNeighborLoss):
        weigh = functools.partial(weigh_as_trained, criterion, gamma=criterion.config.gamma)
        by_encoder = criterion.queue.search_features is not None
        search = (method.momentum_encoder, "target-encoder") if by_encoder else (method.target_network, "y2")
        return EmbeddingSpace(
            search[0], nn.Sequential(method.encoder, method.projector), search[1], weigh, criterion.queue,
            config.image_size, _describe(criterion), criterion, method.target_network if by_encoder else None,
        )  # fmt: skip
    if queue:
        if method.queue is None:
            raise UserError(
                f"{run} was trained with {config.method}, which has no queue. Omit --candidates queue or give a "
                "folder of images"
            )
        description = f"the {config.method} run's key projections; w by Eq. 4 on the same features"
        return EmbeddingSpace(
            method.target_network, None, "key", weigh_by_cosine, method.queue, config.image_size, description
        )
    description = f"the encoder's features (the run's method is {config.method}); w by Eq. 4 on the same features"
    encoder = method.exported_encoder
    return EmbeddingSpace(encoder, None, "checkpoint", weigh_by_cosine, None, config.image_size, description)


def weigh_by_cosine(y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
    """Compute Eq. 4 with f1 and f2 the identity, temperature 1 and a row maximum of 1."""
    return positiveness(y1, neighbors, mask, gamma="max")


def weigh_as_trained(
    criterion: SoftNeighborLoss, y1: Tensor, neighbors: Tensor, mask: Tensor, *, gamma: float | Literal["max", "pull"]
) -> Tensor:
    """Compute Eq. 4 of y1 (n, D) and neighbors (n, K, D) with the weights, f1, f2 and temperature of the run."""
    criterion.f1.to(y1.device)
    criterion.f2.to(y1.device)
    return criterion.positiveness(y1, neighbors, mask, gamma=gamma)


def _describe(criterion: SoftNeighborLoss) -> str:
    s = criterion.config
    searched = "the projections y2" if criterion.queue.search_features is None else "the target encoder's features"
    if s.neighbor_weights == "hard":
        return f"{searched} (Eq. 3); the run's weights are hard: every w is 1"
    learned = "learned f1 and f2" if s.attention == "linear" else "f1 and f2 the identity"
    return f"{searched} (Eq. 3); w by Eq. 4 of y1, {learned}, temperature {s.attention_temperature:g}"
