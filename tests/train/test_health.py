import math

import pytest
import torch
import torch.nn.functional as F

from snclr.methods.base import StepOutput
from snclr.train.health import (
    collapsed,
    effective_rank,
    feature_spread,
    health,
    neighbor_agreement,
    neighbor_purity,
    positiveness_entropy,
    queue_knn,
)
from tests.methods import naive


def test_spread_is_one_for_uniform_features_and_zero_for_equal_ones():
    torch.manual_seed(0)
    spread = F.normalize(torch.randn(4000, 64), dim=1)
    assert feature_spread(spread) == pytest.approx(1.0, abs=0.02)
    assert feature_spread(spread[:1].repeat(10, 1)) == pytest.approx(0.0, abs=1e-6)


def test_effective_rank_matches_the_naive_definition():
    torch.manual_seed(0)
    features = torch.randn(20, 6)
    assert effective_rank(features) == pytest.approx(naive.effective_rank(features.tolist()), rel=1e-6)
    wide = torch.randn(6, 20)  # fewer images than dims
    assert effective_rank(wide) == pytest.approx(naive.effective_rank(wide.tolist()), rel=1e-6)
    line = torch.linspace(-1, 1, 20)[:, None] * torch.randn(1, 6)
    assert effective_rank(line) == pytest.approx(1.0, abs=1e-3)


class WithoutFloat64(torch.Tensor):
    """A tensor on a device without float64, such as MPS; `cpu` returns a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, cls) and result.dtype is torch.float64:
            raise TypeError(f"{func} makes a float64 tensor, which the device does not have")
        return result


def test_health_needs_no_float64_on_the_device():
    torch.manual_seed(0)
    features, ids = F.normalize(torch.randn(12, 6), dim=1), torch.randint(9, (12, 3))
    labels = torch.arange(20) % 3
    plain = StepOutput(torch.tensor(1.0), features, ids, ids, ids.flip(0), ids, torch.rand(12, 3), torch.rand(12, 3))
    on_device = StepOutput(*(value.as_subclass(WithoutFloat64) for value in plain[:8]))
    with pytest.raises(TypeError, match="float64"):
        on_device.features.double()
    expected = health(plain, labels, torch.arange(12))
    assert health(on_device, labels.as_subclass(WithoutFloat64), torch.arange(12)) == pytest.approx(expected)
    assert len(expected) >= 7


def test_positiveness_entropy_is_one_for_equal_weights_and_zero_for_a_single_one():
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    equal = torch.tensor([[0.25] * 4, [1.0, 1.0, 0.0, 0.0]])  # the scale of a row does not matter
    assert positiveness_entropy(equal, mask) == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0, 0, 0], [0.5, 0, 0, 0]])
    assert positiveness_entropy(one, mask) == pytest.approx(0.0)
    assert math.isnan(positiveness_entropy(equal, torch.zeros_like(mask)))


def test_neighbor_purity_counts_only_neighbors_with_a_known_class():
    labels = torch.tensor([0, 1, -1])
    neighbor_labels = torch.tensor([[0, 1, -1], [1, 1, 0], [0, 0, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    assert neighbor_purity(labels, neighbor_labels, mask) == pytest.approx(3 / 4)


def test_neighbor_agreement_is_the_share_of_images_found_from_both_views():
    ids = torch.tensor([[1, 2, 2], [3, 4, -1]])
    other = torch.tensor([[2, 5, 6], [7, 4, -1]])
    assert neighbor_agreement(ids, other) == pytest.approx(3 / 5)
    assert neighbor_agreement(ids, ids.flip(1)) == 1
    assert math.isnan(neighbor_agreement(ids - 9, other))


def test_queue_knn_is_the_accuracy_of_the_weighted_vote():
    labels = torch.tensor([0, 1])
    neighbor_labels = torch.tensor([[0, 1, 1], [0, 0, 1]])
    similarity = torch.tensor([[0.9, 0.5, 0.5], [0.9, 0.1, 0.2]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert queue_knn(labels, neighbor_labels, similarity, mask) == pytest.approx(0.5)


def test_health_leaves_out_undefined_metrics():
    features = F.normalize(torch.randn(8, 4), dim=1)
    output = StepOutput(
        loss=torch.tensor(1.0),
        features=features,
        neighbor_ids=torch.full((8, 3), -1),
        neighbor_ages=torch.ones(8, 3, dtype=torch.int64),
        similarity=torch.full((8, 3), -torch.inf),
        positiveness=torch.zeros(8, 3),
    )
    assert set(health(output, torch.zeros(8, dtype=torch.int64), torch.arange(8))) == {"spread", "effective_rank"}


def test_pulled_share_counts_found_neighbors_only():
    output = StepOutput(
        loss=torch.tensor(1.0),
        features=F.normalize(torch.randn(2, 4), dim=1),
        neighbor_ids=torch.tensor([[3, 4], [5, -1]]),
        neighbor_ages=torch.ones(2, 2, dtype=torch.int64),
        similarity=torch.zeros(2, 2),
        positiveness=torch.ones(2, 2),
        pulled=torch.tensor([[1.0, 0.0], [1.0, 0.0]]),
    )
    assert health(output, None, torch.arange(2))["pulled_share"] == pytest.approx(2 / 3)


def test_only_collapsed_features_are_reported_as_collapsed():
    torch.manual_seed(0)
    good = F.normalize(torch.randn(64, 16), dim=1)
    bad = F.normalize(torch.ones(64, 16) + 1e-3 * torch.randn(64, 16), dim=1)
    for features, expected in ((good, False), (bad, True)):
        values = health(StepOutput(torch.tensor(0.0), features), None, torch.arange(64))
        assert collapsed(values, 16) is expected


@pytest.mark.parametrize(("images", "dim"), [(2, 16), (3, 16), (64, 2)])
def test_a_tiny_batch_is_not_reported_as_collapsed(images, dim):
    torch.manual_seed(0)
    values = health(
        StepOutput(torch.tensor(0.0), F.normalize(torch.randn(images, dim), dim=1)), None, torch.arange(images)
    )
    assert values["effective_rank"] < 2
    assert not collapsed(values, min(images - 1, dim))


def test_queue_knn_is_nan_without_classes():
    none = torch.full((4,), -1)
    assert math.isnan(queue_knn(none, none[:, None].repeat(1, 3), torch.rand(4, 3), torch.ones(4, 3, dtype=torch.bool)))
