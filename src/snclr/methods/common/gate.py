"""The gate of the neighbors: they enter the loss once the two views of an image find the same ones.

Neighbors that depend on the view are those of the crop and its colors, not of the image. Measured on labeled data,
they then make the encoder worse (docs/results/neighbor-study.md).
"""

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_reduce_sum
from snclr.methods.common.queue import also_found

COMPARED_NEIGHBORS = 10
"""Neighbors that are compared: agreement rises with K, so a fixed number gives it one meaning.

Without a gate only K are searched, so fewer are compared if K is less."""


class AgreementGate(nn.Module):
    """Opens for an epoch if, in the epoch before, at least `minimum` of the neighbors were found from both views.

    The counts are integers of all ranks, so the decision does not depend on their number. They are part of
    `state_dict()`, so a resumed run decides the same.
    """

    counts: Tensor  # (2,) neighbors of this epoch that both views found, and all

    def __init__(self, minimum: float) -> None:
        super().__init__()
        self.minimum = minimum
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.epoch = 0  # that of the counts
        self.agreement = 0.0  # of the epoch before it

    def agreement_before(self, epoch: int) -> float:
        """Return the agreement in the epoch before. The host waits for the counts in the first step of an epoch."""
        if epoch == self.epoch:
            return self.agreement
        agreed, found = self.counts.tolist()
        return agreed / max(found, 1)

    def is_open(self, epoch: int) -> bool:
        """Return whether neighbors enter the loss in this epoch.

        It changes nothing: a step whose loss is not finite ends the run before `add` counts it.
        """
        return epoch > 0 and self.agreement_before(epoch) >= self.minimum

    def closed_note(self) -> str | None:
        """Say that the loss had no neighbors in the last epoch that was trained; None if the gate was open."""
        if self.is_open(self.epoch):
            return None
        return f"training's last epoch had no neighbors in the loss (--min-agreement {self.minimum:g})"

    @torch.no_grad()
    def add(self, ids: Tensor, other_ids: Tensor, epoch: int) -> None:
        """Count the image ids (N, K) found from one view, -1 where missing, that are also found from the other."""
        if epoch != self.epoch:
            self.agreement = self.agreement_before(epoch)
            self.counts.zero_()
            self.epoch = epoch
        nearest, other = ids[:, :COMPARED_NEIGHBORS], other_ids[:, :COMPARED_NEIGHBORS]
        self.counts += all_reduce_sum(torch.stack([also_found(nearest, other).sum(), (nearest >= 0).sum()]))

    def get_extra_state(self) -> Tensor:
        """Return epoch and agreement as a tensor, which any checkpoint format can store."""
        return torch.tensor([self.epoch, self.agreement], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore epoch and agreement."""
        epoch, self.agreement = state.tolist()
        self.epoch = int(epoch)
