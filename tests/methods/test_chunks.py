"""A batch in chunks: the loss and gradient of the whole batch, with the activations of one chunk in memory."""

import pytest
import torch

from snclr.errors import UserError
from snclr.methods.config import METHODS
from snclr.train.build import build_method, encoder_spec, save_memory
from snclr.train.config import resolve, settings_for_method
from tests.helpers.saved_bytes import SavedBytes
from tests.methods.test_losses import one_by_one
from tests.methods.test_methods import SMALL, batch

REFUSED = {"pirl", "detco", "mae", "cae"}
"""Methods that need a ResNet, or encode only some patches."""


def vit_method(name, **settings):
    given = {**SMALL, "method": name, "encoder": "test_vit", "stem": "auto", **settings}
    config = resolve(settings_for_method(name, given))
    method = build_method(config, encoder_spec(config), classes=5, images=64)
    save_memory(method, config)
    return method


def gradients(method, dtype):
    """The loss and gradients of a step after another, so that the queue is filled."""
    method = method.to(dtype)
    for seed in (0, 1):
        method.zero_grad()
        views, ids, labels = batch(seed, dtype=dtype)
        losses = method.losses(views, ids, epoch=0, labels=labels)
        values = []
        for _ in range(method.loss_parts):
            loss = next(losses)
            loss.backward()
            values.append(float(loss.detach()))
        next(losses, None)
        method.after_step(seed, 10)
    return sum(values), {key: p.grad for key, p in method.named_parameters() if p.grad is not None}, method.state_dict()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_value_gradient_and_state_are_those_of_the_whole_batch(name):
    whole, parts = (vit_method(name, micro_batch=size) for size in (0, 3))  # 8 images: chunks of 3, 3 and 2
    loss, expected, state = gradients(whole, torch.float64)
    same_loss, found, same_state = gradients(parts, torch.float64)
    assert same_loss == pytest.approx(loss, rel=1e-12)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-12, msg=key)
    for key, value in state.items():  # batch norms of the heads, queue, centers
        torch.testing.assert_close(same_state[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_single_precision_agrees_too():
    _, expected, _ = gradients(vit_method("snclr"), torch.float32)
    _, found, _ = gradients(vit_method("snclr", micro_batch=2), torch.float32)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < 1e-6 * max(1.0, largest)


def test_the_second_pass_draws_the_random_numbers_of_the_first():
    """With drop path, the gradient is that of the network that computed the loss."""
    method = vit_method("byol", micro_batch=3, drop_path=0.5).double()
    views, ids, _ = batch(0, dtype=torch.float64)
    weight = method.encoder.blocks[-1].mlp.fc2.weight

    def loss():
        torch.manual_seed(5)
        return method(views, ids, epoch=0).loss

    loss().backward()
    expected = float(weight.grad[0, 0])
    with torch.no_grad():
        change = 1e-6
        weight[0, 0] += change
        above = float(loss())
        weight[0, 0] -= 2 * change
        below = float(loss())
    assert (above - below) / (2 * change) == pytest.approx(expected, rel=1e-4)
    assert abs(expected) > 1e-6


def test_the_activations_of_one_chunk_are_in_memory():
    peaks = []
    for size in (0, 2):
        method = vit_method("byol", micro_batch=size)
        with (saved := SavedBytes()):
            one_by_one(method, *batch(0)[:2])
        peaks.append(saved.peak)
    assert peaks[1] < 0.4 * peaks[0]


def test_batch_norm_in_the_encoder_is_refused():
    config = resolve(settings_for_method("snclr", {**SMALL, "encoder": "resnet18", "micro_batch": 4}))
    with pytest.raises(UserError, match="needs an encoder without batch norm, such as vit_small; resnet18 normalizes"):
        save_memory(build_method(config, encoder_spec(config)), config)


@pytest.mark.parametrize("option", [{"micro_batch": 2}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize("name", ["mae", "cae"])
def test_masked_methods_refuse_both_settings(name, option):
    with pytest.raises(UserError, match=f"do not support --method {name}"):
        vit_method(name, image_size=32, **option)
