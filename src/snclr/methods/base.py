"""What the training loop knows about a method: this and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from snclr.soft_neighbors import NeighborQueue


class StepOutput(NamedTuple):
    """What one forward pass gives: the loss to descend, and detached tensors to look at."""

    loss: Tensor  # ()
    features: Tensor  # (N, D) normalised projections, for spread and rank
    neighbor_ids: Tensor | None = None  # (N, K) image ids, -1 where missing
    neighbor_ages: Tensor | None = None  # (N, K) in steps
    similarity: Tensor | None = None  # (N, K) cosine
    positiveness: Tensor | None = None  # (N, K) w


class Method(Protocol):
    """A method: an `nn.Module` whose forward is one training step's loss.

    `state_dict()` holds everything it needs to go on, queue included.
    """

    encoder: nn.Module

    @property
    def queue(self) -> NeighborQueue | None:
        """Earlier features with their image ids, where the method keeps any."""
        ...

    @property
    def encoders(self) -> list[nn.Module]:
        """Every network that starts from the encoder's weights: the trained one first, then its momentum copy."""
        ...

    @property
    def key_network(self) -> nn.Module:
        """Images (n, 3, S, S) → the features (n, D) that stand for them: what a queue holds, or would."""
        ...

    def __call__(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """The loss of a batch of two views (N, 3, S, S) each, of images `ids` (N,) with `labels` (N,) where known."""
        ...

    def finish_step(self, step: int, total_steps: int) -> None:
        """What follows the optimiser's step: the momentum update, the push into the queue."""
        ...
