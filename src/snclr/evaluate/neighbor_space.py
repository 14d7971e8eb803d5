"""In which features a run's images are compared, and how their neighbours are weighed: as the run was trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.soft_neighbors import NeighborQueue, SoftNeighborLoss, positiveness

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""y1 (n, D), neighbours (n, K, D) and their mask (n, K) to w (n, K), the largest of a row 1."""


@dataclass(frozen=True)
class Space:
    """`search`: images to what is searched with and in; `attend`: images to what weighs (None: the same)."""

    search: nn.Module
    attend: nn.Module | None
    role: str
    """What `search` gives, for the store of features: y2, key, checkpoint (the encoder in the run's last checkpoint) or
    encoder (the one in encoder.safetensors)."""
    weigh: Weigh
    queue: NeighborQueue | None
    image_size: int
    words: str


def open_space(run: str | Path, *, queue: bool = False, device: str = "cpu") -> Space:
    """The space of a run: SNCLR's projections y2, weighed by y1; of any other method the encoder's features.

    `queue` asks for the features a queue holds, whatever the method; UserError where it has none.
    """
    from snclr.train.run_folder import open_run
    from snclr.train.saved_run import load_method

    folder = open_run(run)
    if not folder.config.is_file() and not queue:  # weights alone, such as those of somebody else's run
        return _encoder_of_folder(run)
    method, config, _ = load_method(run, torch.device(device))
    criterion = getattr(method, "criterion", None)
    if isinstance(criterion, SoftNeighborLoss):
        attend = nn.Sequential(method.encoder, method.projector)
        weigh, words = _as_trained(criterion)
        return Space(method.key_network, attend, "y2", weigh, criterion.queue, config.image_size, words)
    if queue:
        if method.queue is None:
            raise UserError(
                f"{run} was trained with {config.method}, which has no queue; leave --candidates queue out, or give a "
                "folder of images"
            )
        words = f"the {config.method} run's key projections; w by Eq. 4 on the same features"
        return Space(method.key_network, None, "key", weigh_by_cosine, method.queue, config.image_size, words)
    words = f"the encoder's features (the run's method is {config.method}); w by Eq. 4 on the same features"
    return Space(method.encoder, None, "checkpoint", weigh_by_cosine, None, config.image_size, words)


def weigh_by_cosine(y1: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
    """Eq. 4 with f1 and f2 the identity and temperature 1, the largest w of a row 1."""
    return positiveness(y1, neighbors, mask, gamma="max")


def weigh_as_trained(
    criterion: SoftNeighborLoss, y1: Tensor, neighbors: Tensor, mask: Tensor, *, gamma: float | Literal["max"]
) -> Tensor:
    """Eq. 4 of y1 (n, D) and neighbours (n, K, D) with the run's own weights (soft or hard), f1, f2 and temperature."""
    s = criterion.settings
    if s.weights == "hard":
        return mask.to(y1.dtype)
    f1, f2 = criterion.f1.to(y1.device), criterion.f2.to(y1.device)
    return positiveness(f1(y1), f2(neighbors), mask, gamma=gamma, temperature=s.attention_temperature)


def _as_trained(criterion: SoftNeighborLoss) -> tuple[Weigh, str]:
    """`weigh_as_trained`, the largest w of a row 1, and in words."""
    s = criterion.settings
    what = "the projections y2 (Eq. 3)"
    weigh = functools.partial(weigh_as_trained, criterion, gamma="max")
    if s.weights == "hard":
        return weigh, f"{what}; the run's weights are hard: every w is 1"
    learned = "learned f1 and f2" if s.attention == "linear" else "f1 and f2 the identity"
    return weigh, f"{what}; w by Eq. 4 of y1, {learned}, temperature {s.attention_temperature:g}"


def _encoder_of_folder(run: str | Path) -> Space:
    from snclr.export.encoder import load_encoder

    encoder, spec = load_encoder(Path(run))
    words = "the encoder's features (the folder has no heads); w by Eq. 4 on the same features"
    return Space(encoder, None, "encoder", weigh_by_cosine, None, spec.image_size, words)
