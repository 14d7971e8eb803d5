"""Masks of patches: pure functions of (seed, epoch, image id), with the distribution of the papers."""

import random

import numpy as np
import pytest
import torch

from snclr.data import sampler
from snclr.methods.common.hashing import MASK, hash_bits
from snclr.methods.masked.base import block_masks, random_masks
from snclr.runtime import random_bits

GRID, PATCHES = 14, 196


def masks(kind, ids, *, seed=0, epoch=0):
    if kind == "random":
        return random_masks(seed, epoch, ids, PATCHES, 49)
    return block_masks(seed, epoch, ids, GRID, 98)


def as_grid(mask):
    grid = torch.zeros(len(mask.masked), PATCHES, dtype=torch.bool)
    return grid.scatter_(1, mask.masked, True).view(-1, GRID, GRID)


def test_the_bits_are_those_of_the_views_with_a_number_of_their_own():
    ids = torch.tensor([0, 5, 1_281_166, 2**40 + 3])
    for seed, epoch in ((0, 0), (7, 3), (2**32 - 1, 799)):
        expected = random_bits.hash_bits(seed, epoch, ids.numpy(), MASK, np.arange(1, 10))
        assert hash_bits(seed, epoch, ids, MASK, 9).tolist() == expected.tolist()
    assert min(sampler.ORDER, sampler.REPLACEMENT, sampler.SHARD_ORDER) > MASK


@pytest.mark.parametrize("kind", ["random", "block"])
def test_a_mask_depends_only_on_seed_epoch_and_image(kind):
    ids = torch.arange(40)
    mask = masks(kind, ids)
    both = torch.cat(list(mask), dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(PATCHES).expand(40, -1))  # each patch is visible or masked
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:7]
    some = masks(kind, ids[order])
    assert torch.equal(some.masked, mask.masked[order])
    assert torch.equal(some.visible, mask.visible[order])
    for other in (masks(kind, ids, seed=1), masks(kind, ids, epoch=1), masks(kind, ids + 40)):
        assert (other.masked != mask.masked).any(dim=1).all()


def test_random_masks_choose_every_patch_equally_often():
    frequency = as_grid(masks("random", torch.arange(4000))).float().mean(dim=0)
    assert float((frequency - 0.75).abs().max()) < 5 * (0.75 * 0.25 / 4000) ** 0.5


def test_block_masks_have_the_distribution_of_the_sequential_algorithm():
    from lightly.models.utils import random_block_mask_image

    random.seed(0)
    count, options = 400, {"min_num_masks_per_block": 16, "max_attempts_per_block": 10}
    reference = torch.stack([random_block_mask_image((GRID, GRID), 98, **options) for _ in range(count)]).float()
    # Unlike CAE's, lightly's algorithm gives up with a few patches missing.
    assert 96 < float(reference.sum(dim=(1, 2)).mean()) <= 98
    found = as_grid(masks("block", torch.arange(4 * count))).float()
    assert torch.equal(found.sum(dim=(1, 2)), torch.full((4 * count,), 98.0))
    # Five standard errors, and half a patch in 100 for those that are missing.
    assert float((found.mean(dim=0) - reference.mean(dim=0)).abs().max()) < 5 * 0.5 * (1.25 / count) ** 0.5 + 0.005

    def equal_neighbors(grid):
        rows, columns = grid[:, 1:] == grid[:, :-1], grid[:, :, 1:] == grid[:, :, :-1]
        return float(torch.cat([rows.flatten(), columns.flatten()]).float().mean())

    assert abs(equal_neighbors(found) - equal_neighbors(reference)) < 0.01
    assert equal_neighbors(found) > 0.8  # 0.5 for single patches
    single = as_grid(random_masks(0, 0, torch.arange(count), PATCHES, 98)).float()
    assert equal_neighbors(single) < 0.6


def test_small_grids_have_the_wanted_number_of_patches():
    for grid, visible in ((2, 2), (3, 4), (8, 32), (8, 1), (2, 3)):
        mask = block_masks(0, 0, torch.arange(20), grid, visible)
        assert mask.visible.shape == (20, visible)
        assert torch.equal(torch.cat(list(mask), dim=1).sort(dim=1).values, torch.arange(grid**2).expand(20, -1))
