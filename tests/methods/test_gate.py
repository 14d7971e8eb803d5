"""The gate of the neighbors: its decision against loops over image ids, and its effect on loss, state and runs."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snclr.methods.common.gate import AgreementGate
from tests.methods.test_methods import batch, small

STEPS_PER_EPOCH = 3


def naive_share(pairs):
    """Return the share of ids found from one view, -1 for missing, that the same row of the other view also has."""
    found = [(image, set(other)) for a, b in pairs for row, other in zip(a, b, strict=True) for image in row[:10]]
    found = [(image, other) for image, other in found if image >= 0]
    return sum(image in other for image, other in found) / len(found) if found else 0.0


ids = st.lists(st.lists(st.integers(-1, 6), min_size=4, max_size=4), min_size=2, max_size=2)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=4), st.floats(0.01, 1))
def test_the_gate_opens_if_enough_neighbors_agreed_in_the_epoch_before(pairs, minimum):
    gate = AgreementGate(minimum)
    assert not gate.is_open(0)
    for a, b in pairs:
        gate.add(torch.tensor(a), torch.tensor(b), 0)
        assert not gate.is_open(0)  # the first epoch has none before it
    assert gate.is_open(1) == (naive_share(pairs) >= minimum)
    resumed = AgreementGate(minimum)
    resumed.load_state_dict(copy.deepcopy(gate.state_dict()))
    for each in (gate, resumed):
        each.add(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), 1)
        assert each.is_open(1) == (naive_share(pairs) >= minimum)  # constant within an epoch
        assert (each.closed_note() is None) == each.is_open(1)
        assert each.is_open(2) == (minimum <= 0.5)


def train(method, epochs=3):
    """Return the losses of training in double precision, with the gate's state read before each step."""
    losses = []
    for number in range(epochs * STEPS_PER_EPOCH):
        views, image_ids, _ = batch(number, dtype=torch.float64)
        output = method(views, image_ids % 19, epoch=number // STEPS_PER_EPOCH)
        output.loss.backward()
        with torch.no_grad():
            for parameter in method.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        method.after_step(number, epochs * STEPS_PER_EPOCH)
        losses.append((float(output.loss.detach()), output))
    return losses


@pytest.mark.parametrize("neighbors", [3, 12])
def test_a_run_trains_without_neighbors_until_the_gate_opens(neighbors):
    always = train(small("snclr", neighbors=neighbors).double())
    never = train(small("snclr", neighbors=neighbors, sides="neither").double())
    free = train(small("snclr", neighbors=neighbors, neighbor_free_epochs=1).double())
    tiny_share, full_share = (
        train(small("snclr", neighbors=neighbors, min_agreement=share).double()) for share in (1e-6, 1.0)
    )
    assert [loss for loss, _ in full_share] == [loss for loss, _ in never]
    assert [loss for loss, _ in tiny_share] == [loss for loss, _ in free]
    assert [loss for loss, _ in free][-1] not in ([loss for loss, _ in never][-1], [loss for loss, _ in always][-1])


def test_agreement_is_that_of_the_ten_nearest_for_any_k():
    gated = {k: small("snclr", neighbors=k, min_agreement=1.0).double() for k in (3, 12)}
    outputs = {k: [output for _, output in train(method)] for k, method in gated.items()}
    shares = [
        naive_share([(o.found_ids.tolist(), o.other_found_ids[:, :10].tolist()) for o in outputs[k][-STEPS_PER_EPOCH:]])
        for k in (3, 12)
    ]
    for method, share in zip(gated.values(), shares, strict=True):
        assert method.gate.agreement_before(3) == pytest.approx(share)
    assert shares[0] == shares[1]
    assert outputs[3][-1].neighbor_ids.shape[1] == 3  # the loss has K neighbors


def test_the_plain_search_finds_one_set_of_neighbors_and_has_no_gate():
    assert small("snclr", search_view="plain", min_agreement=0.5).gate is None
    assert small("snclr", min_agreement=0.5).gate is not None
