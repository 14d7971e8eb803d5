"""Activation checkpointing: the same gradients and batch norm statistics with fewer saved tensors."""

import copy

import pytest
import torch

from snclr.errors import UserError
from snclr.models.checkpointing import checkpoint_activations
from snclr.models.encoders import build_encoder, resolve_encoder
from snclr.models.vit import set_drop_path
from tests.helpers.saved_bytes import SavedBytes


def encoder_for(name, size):
    torch.manual_seed(0)
    encoder = build_encoder(resolve_encoder(name, image_size=size))
    if name == "vit_tiny":
        set_drop_path(encoder, 0.5, name)
    return encoder.train()


def run(encoder, images, *, saved):
    """Two passes, as for two views; return what was computed and the saved bytes of one."""
    torch.manual_seed(1)
    for half in images:
        with saved:
            output = encoder(half)
        output.square().sum().backward()
    return output.detach(), {name: p.grad for name, p in encoder.named_parameters()}


# torchvision, timm's switch with batch norm, with batch norm and activation in one layer, and without batch norm
@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 32), ("resnet10-tiny", 32), ("test_efficientnet", 64), ("vit_tiny", 16)]
)
def test_gradients_and_statistics_are_the_same(name, size):
    images = torch.randn(2, 4, 3, size, size, generator=torch.Generator().manual_seed(2))
    plain, saving = encoder_for(name, size), encoder_for(name, size)
    start = copy.deepcopy(plain.state_dict())
    checkpoint_activations(saving, name)
    all_saved, fewer = SavedBytes(), SavedBytes()
    (output, gradients), (same_output, same_gradients) = (
        run(plain, images, saved=all_saved),
        run(saving, images, saved=fewer),
    )
    assert torch.equal(output, same_output)
    for key, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[key], gradient, rtol=0, atol=0)
    assert plain.state_dict().keys() == saving.state_dict().keys()
    for key, value in plain.state_dict().items():
        assert torch.equal(saving.state_dict()[key], value), key
    if tracked := [key for key in start if key.endswith("num_batches_tracked")]:
        assert all(int(saving.state_dict()[key]) == 2 for key in tracked)  # once per view
    assert fewer.peak < 0.5 * all_saved.peak


def test_an_encoder_without_support_is_named():
    with pytest.raises(UserError, match="test_tiny does not support --activation-checkpointing"):
        checkpoint_activations(torch.nn.Linear(2, 2), "test_tiny")
