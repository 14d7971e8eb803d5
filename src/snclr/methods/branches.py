"""What the pages share about their networks: one branch, or a trained one and its momentum copy.

A page builds its own parts, under these names, and says what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.ema import ema_update, momentum_at


class OneBranch(nn.Module):
    """Both views go through the same encoder and projector."""

    encoder: nn.Module
    projector: nn.Module

    @property
    def encoders(self) -> list[nn.Module]:
        """The one encoder."""
        return [self.encoder]

    @property
    def key_network(self) -> nn.Module:
        """Images → y."""
        return nn.Sequential(self.encoder, self.projector)

    def finish_step(self, step: int, total_steps: int) -> None:
        """Nothing follows the optimiser's step."""


class TwoBranches(nn.Module):
    """A trained encoder and projector, and a copy of each that follows them and takes no gradient."""

    encoder: nn.Module
    projector: nn.Module
    momentum_encoder: nn.Module
    momentum_projector: nn.Module
    momentum: float
    momentum_schedule: str

    @property
    def encoders(self) -> list[nn.Module]:
        """The trained encoder and its momentum copy."""
        return [self.encoder, self.momentum_encoder]

    @property
    def key_network(self) -> nn.Module:
        """Images → y2, as a queue holds it."""
        return nn.Sequential(self.momentum_encoder, self.momentum_projector)

    @torch.no_grad()
    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The y2 of each view. Asked for before the trained passes: its activations are gone when they need memory."""
        return [self.momentum_projector(self.momentum_encoder(view)) for view in views]

    def finish_step(self, step: int, total_steps: int) -> None:
        """Move the copies."""
        m = momentum_at(step, total_steps, self.momentum, self.momentum_schedule)
        ema_update(self.encoder, self.momentum_encoder, m)
        ema_update(self.projector, self.momentum_projector, m)
