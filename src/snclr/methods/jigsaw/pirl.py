"""PIRL: the features of an image and of its shuffled patches both match the image's entry in a memory bank.

Misra, van der Maaten: "Self-Supervised Learning of Pretext-Invariant Representations", CVPR 2020. Eq. 5: a weighted sum
of the noise-contrastive loss (Eq. 3 and 4) of the image and of its jigsaw patches. The image has a linear head. Each
of the nine patches has another one; the nine results are concatenated and pass a last linear layer. View 1 is the
image, view 2 is cut into patches (`common/grid.py`).

Differences from the authors' code (VISSL): the bank starts empty instead of with noise, and in its first epoch an image
is matched with its own feature. All images of a step share their negatives. The patches of an image have the same color
changes. The authors' code normalizes Eq. 3 by a constant that it estimates from the first batch (NPID's estimate).

x1 ── encoder ── projector ── f ─────────────────────────────────────────┐
                                                                          ├ NCE with m, the bank's entry of the image
x2 ── nine patches ── encoder ── linear, concatenated ── linear ── g ────┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.errors import UserError
from snclr.methods.base import Method, StepOutput
from snclr.methods.common.bank import MemoryBank
from snclr.methods.common.batch_norm import keep_running_statistics
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.grid import PATCHES, Concatenate, cut_grid
from snclr.methods.config import PIRLConfig


class PIRL(Method):
    """The loss is (1 − λ) · NCE(f, m) + λ · NCE(g, m); after the step, f is averaged into the bank."""

    config: PIRLConfig
    projector_bn = False

    def __init__(self, encoder: nn.Module, num_features: int, config: PIRLConfig, *, images: int, seed: int) -> None:
        super().__init__(encoder, num_features, config)
        if hasattr(encoder, "patch_embed"):
            raise UserError(
                f"method pirl passes small patches to the encoder; a {type(encoder).__name__} has one image size."
                " Choose a ResNet such as --encoder resnet50."
            )
        self.patch_projector = nn.Sequential(
            self.build_projector(num_features), Concatenate(), nn.Linear(PATCHES * config.dim, config.dim)
        )
        self.bank = MemoryBank(images, config.dim, seed=seed)

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of the images (view 1) and of the patches (view 2)."""
        c = self.config
        patches = cut_grid(views[1], ids, seed=self.bank.seed, epoch=epoch, view=1)
        with keep_running_statistics(self.encoder):
            jigsaw = self.patch_projector(self.encode(patches))
        (image,) = self.project(views[:1])
        with autocast_disabled(image):
            f, g = l2_normalize(image), l2_normalize(jigsaw)
            m = self.bank.positives(ids, f.detach())
            negatives, excluded = self.bank.negatives(ids, c.bank_negatives)
            image_loss, jigsaw_loss = (
                nce_loss(v, m, negatives.to(v.dtype), excluded, tau=c.temperature) for v in (f, g)
            )
            loss = (1 - c.jigsaw_weight) * image_loss + c.jigsaw_weight * jigsaw_loss
        self._to_push = all_gather(f.detach()), all_gather(ids)
        return StepOutput(loss=loss, features=f.detach())

    def push(self, features: Tensor, ids: Tensor) -> None:
        """Average the features of the images into the bank."""
        self.bank.update(features, ids, momentum=self.config.bank_momentum)


def nce_loss(v: Tensor, m: Tensor, negatives: Tensor, excluded: Tensor, *, tau: float) -> Tensor:
    """Eq. 4: −log h(m) − Σ_n log(1 − h(n)) with h(x) = exp(v·x/τ) / (exp(v·m/τ) + Σ_n exp(v·n/τ)) of Eq. 3.

    v and m (N, D) and the negatives n (K, D) are normalized; `excluded` (N, K) is True where n is not a negative.
    Without negatives, loss and gradient are 0.
    """
    positive = (v * m).sum(dim=1, keepdim=True) / tau
    negative = (v @ negatives.T / tau).masked_fill(excluded, -torch.inf)
    log_h = torch.cat([positive, negative], dim=1).log_softmax(dim=1)
    # h = 1 for a negative would be an infinite loss; rounding reaches it before the exact value does.
    largest = 1 - torch.finfo(v.dtype).eps
    return -(log_h[:, 0] + torch.log1p(-log_h[:, 1:].exp().clamp(max=largest)).sum(dim=1)).mean()
