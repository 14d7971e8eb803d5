"""RandAugment: operations against torchvision, and independence of the batch."""

import numpy as np
import pytest
import torch

from snclr.data.sampler import ViewKey
from snclr.data.transforms.randaugment import NUMBERS, OPERATIONS, rand_augment
from snclr.data.transforms.views import VIEW_GROUPS, color_views


def images(count=6, size=16):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_changes_an_image_and_full_strength_more_than_little(name):
    x = (images(1)[0] * 180 + 30).to(torch.uint8)  # room above and below
    weak, strong = OPERATIONS[name](x, 0.05, 1.0), OPERATIONS[name](x, 1.0, 1.0)
    assert strong.shape == x.shape
    assert strong.dtype == torch.uint8
    moved = [(part.int() - x.int()).abs().float().mean() for part in (weak, strong)]
    assert moved[1] > 2
    assert moved[1] >= moved[0]


def test_signed_operations_go_both_ways():
    x = (images(1)[0] * 255).to(torch.uint8)
    for name in ("rotate", "shear x", "shear y", "translate x", "translate y", "brightness", "contrast", "color"):
        assert not torch.equal(OPERATIONS[name](x, 0.5, 1.0), OPERATIONS[name](x, 0.5, -1.0)), name
    right = OPERATIONS["translate x"](x, 1.0, 1.0)
    assert torch.equal(right[:, :, 7:], x[:, :, :-7])  # 45 % of 16 pixels
    assert right[:, :, :7].unique(dim=1).flatten().unique().tolist() == [104, 116, 124]


def test_randaugment_does_not_depend_on_the_batch():
    x, numbers = images(), np.random.default_rng(0).random((6, NUMBERS))
    whole = rand_augment(x, numbers, 0.5)
    for row in range(6):
        assert torch.equal(rand_augment(x[row : row + 1], numbers[row : row + 1], 0.5)[0], whole[row])
    touched = (numbers[:, ::4] < 0.5).any(axis=1)
    assert 0 < touched.sum() < 6
    for row in np.flatnonzero(~touched):
        assert torch.equal(whole[row], x[row])


def test_infomin_views_are_stronger_than_byol_views():
    pictures = (images(64) * 255).to(torch.uint8)
    key = ViewKey(seed=1, epoch=0, ids=np.arange(64), view=0)
    without = [color_views(pictures, VIEW_GROUPS[name][0], key) for name in ("byol", "infomin")]
    half = color_views(pictures[:9], VIEW_GROUPS["infomin"][0], key._replace(ids=np.arange(9)))
    assert torch.equal(half, without[1][:9])
    spread = [(view - pictures / 255).abs().mean() for view in without]
    assert spread[1] > spread[0]
