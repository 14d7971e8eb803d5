"""The embedding space of a run: the features its images are compared in and how neighbors are weighted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def weigh_by_cosine(y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
    """Compute Eq. 4 with f1 and f2 the identity, temperature 1 and a row maximum of 1."""
    return positiveness(y1, neighbors, mask, gamma="max")


@dataclass(frozen=True)
class EmbeddingSpace:
    """The networks whose features the search (Eq. 3) and the attention (Eq. 4) compare, and how w is computed."""

    networks: Mapping[str, nn.Module]
    """By name, as in the feature cache: those of `snclr_space`, or a single network: "encoder" (of the encoder file),
    "checkpoint" (the encoder of the last checkpoint) or "key" (encoder and head that fill the queue)."""
    searched: str
    """Name of the network whose features are searched."""
    image_size: int
    description: str
    queue: NeighborQueue | None = None
    criterion: SoftNeighborLoss | None = None
    """SNCLR's loss: its settings give w as in training. If None, w is computed from the searched features."""

    def weigh(self, y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
        """Compute w (n, K) of y1 (n, D) and neighbors (n, K, D), with the settings of the run's SNCLR loss if any."""
        if self.criterion is None:
            return weigh_by_cosine(y1, neighbors, mask)
        return weigh_as_trained(self.criterion, y1, neighbors, mask)

    def features(self, session: Session, dataset: ImageDataset, network: str, description: str) -> Features:
        """Extract the features of a dataset by a network, or read them from the run's cache."""
        return session.features(
            self.networks[network], dataset, image_size=self.image_size, role=network, description=description
        )

    def projections(self, session: Session, dataset: ImageDataset) -> Tensor | None:
        """Return the projections y2 (n, D) of a gallery; None if they are the features of the search."""
        if self.criterion is None or self.searched == "y2":
            return None
        return self.features(session, dataset, "y2", "gallery (projections)").features

    @property
    def weighted_config(self) -> SoftNeighborConfig | None:
        """The settings of a loss in which neighbors are weighted positives; None for any other loss."""
        config = None if self.criterion is None else self.criterion.config
        return None if config is None or config.sides in ("negatives", "neither", "other-negatives") else config

    def describe_weights(self, k: int) -> str | None:
        """Describe the w of the k neighbors of `rank_as_trained` in words.

        None if the run's loss has no w, so that cosines should be shown instead.
        """
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
        among = max(k, c.neighbors)
        equal = 1.0 if gamma == "max" else 1 / among / gamma
        trained = f" ({c.neighbors} in training)" if k > c.neighbors else ""
        return (
            f"w is computed as in training: a softmax over the {among} nearest neighbors{trained} with temperature "
            f"{c.attention_temperature:g}, {largest}. Equal weights would be {equal:.3f}"
        )


def encoder_space(run: str | Path) -> EmbeddingSpace:
    """Open the space of the saved encoder's features."""
    encoder, spec = run_encoder(run)
    description = "the encoder's features (there are no projection heads); w by Eq. 4 on the same features"
    return EmbeddingSpace({"encoder": encoder}, "encoder", spec.image_size, description)


def open_space(run: str | Path, *, queue: bool = False, device: str = "cpu") -> EmbeddingSpace:
    """Open the space of a run: SNCLR's projections y2 weighted by y1, or the encoder's features of other methods.

    With `queue`, open the space of the features in the method's queue; UserError if it has none.
    """
    if not open_run(run).config.is_file() and not queue:  # an encoder without heads
        return encoder_space(run)
    method, config = load_trained_method(run, torch.device(device))
    size = config.image_size
    if isinstance(getattr(method, "criterion", None), SoftNeighborLoss):
        return snclr_space(method, size)
    if not queue:
        description = f"the encoder's features (the run's method is {config.method}); w by Eq. 4 on the same features"
        return EmbeddingSpace({"checkpoint": method.exported_encoder}, "checkpoint", size, description)
    if method.queue is None:
        raise UserError(
            f"{run} was trained with {config.method}, which has no queue. Omit --candidates queue or give a "
            "folder of images"
        )
    description = f"the {config.method} run's key projections; w by Eq. 4 on the same features"
    return EmbeddingSpace({"key": method.target_network}, "key", size, description, queue=method.queue)


def snclr_space(method: Any, image_size: int) -> EmbeddingSpace:
    """Return the space of the projections of an SNCLR method."""
    networks = {
        "y1": nn.Sequential(method.encoder, method.projector),
        "y2": method.target_network,
        "target-encoder": method.momentum_encoder,
    }
    queue, criterion = method.criterion.queue, method.criterion
    searched = "y2" if queue.search_features is None else "target-encoder"
    s, features = criterion.config, "the projections y2" if searched == "y2" else "the target encoder's features"
    weights = "the run's weights are hard: every w is 1"
    if s.neighbor_weights == "soft":
        learned = "learned f1 and f2" if s.attention == "linear" else "f1 and f2 the identity"
        weights = f"w by Eq. 4 of y1, {learned}, temperature {s.attention_temperature:g}"
    return EmbeddingSpace(networks, searched, image_size, f"{features} (Eq. 3); {weights}", queue, criterion)


def weigh_as_trained(criterion: SoftNeighborLoss, y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
    """Compute Eq. 4 of y1 (n, D) and neighbors (n, K, D) with the settings, f1 and f2 of the run."""
    criterion.f1.to(y1.device)
    criterion.f2.to(y1.device)
    return criterion.positiveness(y1, neighbors, mask)
