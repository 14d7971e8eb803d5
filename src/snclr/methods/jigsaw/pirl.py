"""PIRL: the features of an image and of its shuffled patches both match the image's entry in a memory bank.

Misra, van der Maaten: "Self-Supervised Learning of Pretext-Invariant Representations", CVPR 2020. Eq. 5: a weighted sum
of the noise-contrastive loss (Eq. 3 and 4) of the image and of its jigsaw patches. The image has a linear head. Each
of the nine patches has another one; the nine results are concatenated and pass a last linear layer. View 1 is the
image, view 2 is cut into patches (`patches.py`).

Differences from the authors' code (VISSL): the bank starts empty instead of with noise, and in its first epoch an image
is matched with its own feature. All images of a step share their negatives. The patches of an image have the same color
changes. The authors' code normalizes Eq. 3 by a constant that it estimates from the first batch (NPID's estimate).

x1 ── encoder ── projector ── f ─────────────────────────────────────────┐
                                                                          ├ NCE with m, the bank's entry of the image
x2 ── nine patches ── encoder ── linear, concatenated ── linear ── g ────┘
"""

import torch
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.errors import UserError
from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.hashing import NEGATIVES, hash_below
from snclr.methods.config import PIRLConfig
from snclr.methods.jigsaw.patches import PATCHES, cut_grid, join_patches, keep_running_statistics


class MemoryBank(nn.Module):
    """The moving average of the features of each of `images` images, by image id: negatives, and the own positive.

    It starts empty: an image without an entry is not a negative. The bank is part of `state_dict()`. The negatives are
    a function of the seed and the number of updates, so they are the same on all ranks and after a resume.

    >>> bank = MemoryBank(images=3, dim=2, seed=0)
    >>> bank.update(torch.eye(2), torch.tensor([2, 0]), momentum=0.5)
    >>> bank.features[2], bank.seen
    (tensor([1., 0.]), tensor([ True, False,  True]))
    """

    features: Tensor
    seen: Tensor

    def __init__(self, images: int, dim: int, *, seed: int) -> None:
        super().__init__()
        if images < 2:
            raise UserError(f"a memory bank needs at least two images, not {images}. Add images.")
        self.register_buffer("features", torch.zeros(images, dim))
        self.register_buffer("seen", torch.zeros(images, dtype=torch.bool))
        self.seed = seed
        self.updates = 0

    def positives(self, ids: Tensor, features: Tensor) -> Tensor:
        """Return the entries (N, D) of images `ids` (N,); an image without one gets its row of `features` (N, D)."""
        return torch.where(self.seen[ids, None], self.features[ids].to(features.dtype), features)

    def negatives(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draw `count` entries (K, D) for the step, or take all if there are no more.

        The second tensor (N, K) is True where an entry is not a negative of the image: its own entry or an empty one.
        """
        images = len(self.features)
        if images <= count:
            drawn = torch.arange(images, device=ids.device)
        else:
            # The number of updates takes the place of the epoch, and 0 that of the image id: one draw for all images.
            drawn = hash_below(images, self.seed, self.updates, torch.zeros_like(ids[:1]), NEGATIVES, count)[0]
        return self.features[drawn], (drawn == ids[:, None]) | ~self.seen[drawn]

    @torch.no_grad()
    def update(self, features: Tensor, ids: Tensor, *, momentum: float) -> None:
        """Average features (B, D) of images `ids` (B,) into their entries; of an image given twice, the last.

        A bad image is replaced by another of the dataset, so an image can be twice in a batch.
        """
        rows = torch.arange(len(ids), device=ids.device)
        last = torch.zeros_like(self.seen, dtype=torch.int64).scatter_reduce_(0, ids, rows, "amax")[ids]
        features = l2_normalize(features)[last].to(self.features.dtype)
        averaged = momentum * self.features[ids] + (1 - momentum) * features
        self.features[ids] = torch.where(self.seen[ids, None], l2_normalize(averaged).to(averaged.dtype), features)
        self.seen[ids] = True
        self.updates += 1

    def get_extra_state(self) -> Tensor:
        """Return the number of updates as a tensor, which any checkpoint format can store."""
        return torch.tensor([self.updates])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of updates."""
        self.updates = int(state[0])


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
            self.build_projector(num_features), join_patches(), nn.Linear(PATCHES * config.dim, config.dim)
        )
        self.bank = MemoryBank(images, config.dim, seed=seed)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of the images (view 1) and of the patches (view 2)."""
        c = self.config
        patches = cut_grid(views[1], ids, seed=self.bank.seed, epoch=epoch, view=1)
        with keep_running_statistics(self.encoder):
            jigsaw = self.patch_projector(self.encode(patches))
        image = self.project(views[0])
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
