"""The queue, the positiveness of missing neighbors, and the errors for invalid settings and arguments."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr import NeighborQueue, SoftNeighborConfig, SoftNeighborLoss, UserError, positiveness, soft_neighbor_loss
from snclr.methods.common.kernels import topk
from snclr.methods.snclr.loss import contrastive_loss
from tests.methods import naive


@given(capacity=st.integers(1, 12), batches=st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=150)
def test_the_queue_is_first_in_first_out_for_any_batch_size_and_capacity(capacity, batches):
    queue = NeighborQueue(capacity, dim=3)
    expected: deque[tuple[int, int]] = deque(maxlen=capacity)  # (image id, push number)
    next_id = 0
    for push, size in enumerate(batches):
        ids = torch.arange(next_id, next_id + size)
        next_id += size
        queue.push(torch.stack([torch.full((3,), float(i + 1)) for i in ids]) if size else torch.zeros(0, 3), ids)
        expected.extend((int(i), push) for i in ids)
        assert len(queue) == len(expected)
    held = sorted(zip(queue.ids[: len(queue)].tolist(), queue.pushed_at[: len(queue)].tolist(), strict=True))
    assert held == sorted(expected)
    ages = queue.ages(torch.arange(len(queue)))
    assert all(1 <= age <= len(batches) for age in ages.tolist())


def test_the_queue_stores_normalized_features_and_searches_only_filled_rows():
    queue = NeighborQueue(capacity=100, dim=4)
    features = 7 * torch.randn(5, 4)
    queue.push(features, torch.arange(5))
    assert torch.allclose(queue.candidates, F.normalize(features, dim=1))
    found = queue.search(-F.normalize(features, dim=1), k=9)
    assert int(found.mask.sum()) == 25  # the empty rows are not candidates
    assert (found.index[:, 5:] == -1).all()
    assert (found.similarity[:, 5:] == -torch.inf).all()


@given(seed=st.integers(0, 10_000), images=st.integers(1, 6), k=st.integers(1, 10))
@settings(max_examples=60)
def test_a_query_never_finds_its_own_image(seed, images, k):
    generator = torch.Generator().manual_seed(seed)
    queue = NeighborQueue(capacity=30, dim=4)
    queue.push(torch.randn(30, 4, generator=generator), torch.randint(images, (30,), generator=generator))
    ids = torch.arange(images)
    found = queue.search(F.normalize(torch.randn(images, 4, generator=generator), dim=1), k, ids)
    neighbor_ids = queue.ids[found.index.clamp(min=0)]
    assert not ((neighbor_ids == ids[:, None]) & found.mask).any()
    other = (queue.ids[None] != ids[:, None]).sum(dim=1)
    assert torch.equal(found.mask.sum(dim=1), other.clamp(max=k))


@given(
    seed=st.integers(0, 10_000), capacity=st.integers(1, 20), batches=st.lists(st.integers(1, 9), max_size=6),
    images=st.integers(1, 8), k=st.integers(1, 6), unique=st.booleans(), search_dim=st.sampled_from([None, 5]),
)  # fmt: skip
@settings(max_examples=150)
def test_the_search_equals_a_loop_over_the_last_pushes(seed, capacity, batches, images, k, unique, search_dim):
    generator = torch.Generator().manual_seed(seed)
    queue = NeighborQueue(capacity, dim=3, search_dim=search_dim, dtype=torch.float64)
    pushed: deque[tuple[int, torch.Tensor]] = deque(maxlen=capacity)
    for size in batches:
        ids = torch.randint(images, (size,), generator=generator)
        features = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        keys = None if search_dim is None else torch.randn(size, 5, generator=generator, dtype=torch.float64)
        queue.push(features, ids, keys)
        pushed.extend(zip(ids.tolist(), F.normalize(features if keys is None else keys, dim=1), strict=True))
    query = F.normalize(torch.randn(4, search_dim or 3, generator=generator, dtype=torch.float64), dim=1)
    ids = torch.randint(images, (4,), generator=generator)
    found = queue.search(query, k, ids, unique=unique)
    held = torch.stack([feature for _, feature in pushed]) if pushed else torch.zeros(0, search_dim or 3)
    held_ids = [image for image, _ in pushed]
    expected = naive.search(query, held, k, ids.tolist(), held_ids, unique)
    for row, want in enumerate(expected):
        count = int(found.mask[row].sum())
        got = queue.ids[found.index[row, :count]].tolist()
        assert got == [held_ids[c] for c in want]
        assert found.similarity[row, :count].tolist() == pytest.approx([float(query[row] @ held[c]) for c in want])
        assert not unique or len(set(got)) == len(got)


def test_the_search_features_are_pushed_if_and_only_if_the_queue_has_them():
    features, ids = torch.randn(2, 3), torch.arange(2)
    for queue, keys in ((NeighborQueue(4, 3), features), (NeighborQueue(4, 3, search_dim=5), None)):
        with pytest.raises(UserError, match="search_features"):
            queue.push(features, ids, keys)


def test_the_queue_is_part_of_the_state_dict():
    first = SoftNeighborLoss(dim=4, queue_length=7, neighbors=3)
    for push in range(3):
        first.queue.push(torch.randn(5, 4), torch.arange(5) + 5 * push)
    second = SoftNeighborLoss(dim=4, queue_length=7, neighbors=3)
    second.load_state_dict(first.state_dict())
    y = torch.randn(6, 4)
    ids = torch.arange(6)
    assert torch.equal(first(y, y, y, ids).loss, second(y, y, y, ids).loss)
    earlier = {name.replace("pushed_at", "births"): value for name, value in first.state_dict().items()}
    third = SoftNeighborLoss(dim=4, queue_length=7, neighbors=3)
    third.load_state_dict(earlier)  # the name in earlier versions
    assert torch.equal(third.queue.pushed_at, first.queue.pushed_at)
    first.queue.push(y, ids)
    second.queue.push(y, ids)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_queue_finds_nearly_the_same_neighbors(dtype):
    features = torch.randn(50, 16)
    full, half = NeighborQueue(50, 16), NeighborQueue(50, 16, dtype=dtype)
    for queue in (full, half):
        queue.push(features, torch.arange(50))
    query = F.normalize(torch.randn(4, 16), dim=1)
    assert torch.allclose(full.search(query, 5).similarity, half.search(query, 5).similarity, atol=1e-2)
    assert half.state_dict()["features"].dtype == dtype


def test_the_two_level_top_k_is_exact():
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 8, dtype=torch.float64), torch.randn(1001, 8, dtype=torch.float64)
    values, index = topk(queries, keys, 3)
    expected = (queries @ keys.T).topk(3, dim=1)
    assert torch.equal(index, expected.indices)
    assert torch.allclose(values, expected.values)


def test_missing_neighbors_have_no_weight_and_no_gradient():
    y1 = torch.randn(3, 4, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    for gamma in (1.0, "max"):
        w = positiveness(y1, torch.randn(3, 2, 4), mask, gamma=gamma)
        assert (w[~mask] == 0).all()
        expected = torch.tensor([1.0, 1.0, 0.0]) if gamma == 1.0 else None
        assert expected is None or torch.allclose(w.sum(dim=1), expected)
        assert gamma == 1.0 or torch.allclose(w.amax(dim=1), torch.tensor([1.0, 1.0, 0.0]))
        (gradient,) = torch.autograd.grad(w.square().sum(), y1)
        assert gradient.isfinite().all()
        assert (gradient[2] == 0).all()


@given(seed=st.integers(0, 10**6), tau=st.sampled_from([0.1, 0.2, 0.5]), spread=st.floats(0.01, 1.0))
@settings(max_examples=100)
def test_a_neighbor_attracts_if_its_weight_exceeds_its_count_times_exp_minus_the_loss(seed, tau, spread):
    draw = torch.Generator().manual_seed(seed)
    z1, y2, candidates = (F.normalize(torch.randn(n, 5, generator=draw, dtype=torch.float64), dim=1) for n in (4, 4, 6))
    index = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(4)])
    w = spread * torch.rand(4, 3, generator=draw, dtype=torch.float64)
    loss = soft_neighbor_loss(z1, y2, candidates, index, w, tau=tau, reduction="none")
    row, column = seed % 4, seed % 3
    entry = index[row, column]
    margin = w[row, column] - (index == entry).sum() * torch.exp(-loss[row])
    nearer = candidates.clone()
    nearer[entry] += 1e-6 * z1[row]
    change = soft_neighbor_loss(z1, y2, nearer, index, w, tau=tau, reduction="none")[row] - loss[row]
    if margin.abs() > 1e-3:
        assert (change < 0) == (margin > 0)  # moving nearer lowers the loss


@pytest.mark.parametrize(
    "bad",
    [
        {"loss_form": "within"}, {"sides": "all"}, {"neighbor_weights": "mild"}, {"attention": "mlp"}, {"gamma": 0.0},
        {"gamma": "min"}, {"temperature": 0.0}, {"neighbors": 0}, {"attention": "linear"},
        {"attention_temperature": -1.0},
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected_by_name(bad):
    with pytest.raises(UserError) as caught:
        SoftNeighborConfig(**bad)
    assert next(iter(bad)) in str(caught.value)


def test_invalid_arguments_are_rejected():
    queue = NeighborQueue(4, 3)
    with pytest.raises(UserError, match=r"push takes features \(B, 3\)"):
        queue.push(torch.zeros(2, 4), torch.arange(2))
    with pytest.raises(UserError, match="at least 1"):
        NeighborQueue(0, 3)
    z = torch.eye(2)
    with pytest.raises(UserError, match="form"):
        soft_neighbor_loss(z, z, z, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), form="x")
    with pytest.raises(UserError, match="pull is for form 'inside'"):
        soft_neighbor_loss(z, z, z, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), form="outside", pull=True)
    with pytest.raises(UserError, match="reduction"):
        contrastive_loss(z, z, reduction="sum")
    with pytest.raises(ValueError, match="at least 1"):
        topk(z, z, 0)
