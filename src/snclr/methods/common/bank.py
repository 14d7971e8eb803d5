"""A memory bank: one feature of every image, as negatives and as the positive of the image itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.common.features import l2_normalize
from snclr.methods.common.hashing import NEGATIVES, hash_below


class MemoryBank(nn.Module):
    """The moving average of the features of each of `images` images, by image id.

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
