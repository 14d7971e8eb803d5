"""The losses of a step one after the other: the same gradients as those of their sum, with one graph at a time."""

import pytest
import torch

from snclr.methods.base import output_after
from tests.helpers.saved_bytes import SavedBytes
from tests.methods.test_methods import batch, small

TWO_WAYS = {
    "snclr": {},
    "snclr with every gradient": {"attention": "linear", "attention_gradient": True, "negatives": "both-views"},
    "snclr as released": {"times_2tau": True, "loss_form": "outside"},
    "mocov2": {"symmetric": True},
    "mocov3": {"times_2tau": True},
    "byol": {},
}


def one_by_one(method, views, ids):
    losses = method.losses(views, ids, epoch=0)
    total = 0.0
    for _ in range(method.loss_parts):
        loss = next(losses)
        loss.backward()
        total += float(loss.detach())
    output = output_after(losses)
    assert float(output.loss) == pytest.approx(total, rel=1e-6)
    return output


def together(method, views, ids):
    output = method(views, ids, epoch=0)
    output.loss.backward()
    return output


@pytest.mark.parametrize("name", TWO_WAYS)
def test_gradients_and_statistics_are_those_of_the_sum(name):
    results = []
    for run in (one_by_one, together):
        method = small(name.split(maxsplit=1)[0], **TWO_WAYS[name])
        assert method.loss_parts == 2
        for number in range(3):  # the queue is empty at first
            method.zero_grad()
            output = run(method, *batch(number)[:2])
            method.after_step(number, 10)
        gradients = {key: p.grad for key, p in method.named_parameters() if p.requires_grad}
        results.append((output, gradients, method.state_dict()))
    (first, gradients, state), (second, expected_gradients, expected_state) = results
    assert float(first.loss) == pytest.approx(float(second.loss.detach()), rel=1e-6)
    for key, gradient in expected_gradients.items():
        assert torch.equal(gradients[key], gradient), key  # a sum of two does not depend on their order
    for key, value in expected_state.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("name", ["snclr", "mocov3", "byol"])
def test_half_of_the_activations_are_in_memory(name):
    peaks = []
    for run in (one_by_one, together):
        method = small(name)
        with (saved := SavedBytes()):
            run(method, *batch(0)[:2])
        assert sum(saved.held.values()) < 0.01 * saved.peak
        peaks.append(saved.peak)
    assert peaks[0] < 0.55 * peaks[1]


@pytest.mark.parametrize("name", ["simclr", "nnclr", "dino"])
def test_other_methods_have_one_loss(name):
    method = small(name)
    losses = method.losses(*batch(0)[:2], epoch=0)
    loss = next(losses)
    assert method.loss_parts == 1
    assert torch.equal(output_after(losses).loss, loss.detach())
