"""Value and gradient of the fast losses against the equations written as loops."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snclr.methods.common import kernels
from snclr.methods.common.queue import nearest_neighbors
from snclr.methods.config import SoftNeighborConfig
from snclr.methods.snclr.loss import (
    FORMS,
    SIDES,
    SoftNeighborLoss,
    contrastive_loss,
    positiveness,
    soft_neighbor_loss,
)
from tests.methods import naive

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def unit_vectors(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, rounding: float = 0.0) -> None:
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * scale + rounding


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 7),
    dim=st.integers(1, 9),
    queued=st.integers(0, 24),
    images=st.integers(1, 12),
    k=st.integers(1, 6),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
    form=st.sampled_from(FORMS),
    sides=st.sampled_from(SIDES),
    negatives=st.sampled_from(["other-view", "both-views"]),
    gamma=st.sampled_from([1.0, 0.3, "max", "pull"]),
    temperature=st.sampled_from([0.1, 1.0]),
    gradient=st.booleans(),
    hard=st.booleans(),
    times_2tau=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@settings(max_examples=400)
def test_loss_and_gradient_equal_the_equations(
    seed, n, dim, queued, images, k, tau, form, sides, negatives, gamma, temperature, gradient, hard, times_2tau, dtype
):
    gamma = 1.0 if gamma == "pull" and form == "outside" else gamma
    generator = torch.Generator().manual_seed(seed)
    y1, z1, y2, same, c = (unit_vectors(generator, size, dim).to(dtype) for size in (n, n, n, n, queued))
    ids = torch.randint(images, (n,), generator=generator)
    candidate_ids = torch.randint(images, (queued,), generator=generator)

    criterion = SoftNeighborLoss(
        dim=dim, queue_length=max(queued, 1), queue_dtype=dtype, neighbors=k, temperature=tau, loss_form=form,
        sides=sides, gamma=gamma, attention_temperature=temperature, attention_gradient=gradient,
        neighbor_weights="hard" if hard else "soft", times_2tau=times_2tau, negatives=negatives,
    )  # fmt: skip
    if queued:
        criterion.queue.push(c, candidate_ids)
    y1_fast, z1_fast = y1.clone().requires_grad_(), z1.clone().requires_grad_()
    fast = criterion(y1_fast, z1_fast, y2, ids, same_view=same)
    fast.loss.backward()

    # The reference uses the same neighbors: rounding could swap those that are equally near.
    picks = [[int(c) for c in row if c >= 0] for row in fast.neighbors.index]
    y1_slow, z1_slow = y1.double().requires_grad_(), z1.double().requires_grad_()
    slow = naive.snclr_loss(
        F.normalize(y1_slow, dim=1), F.normalize(z1_slow, dim=1), F.normalize(y2.double(), dim=1),
        criterion.queue.candidates.double(), picks, tau=tau, form=form, sides=sides, gamma=gamma,
        temperature=temperature, gradient=gradient, hard=hard,
        same_view=F.normalize(same.double(), dim=1) if negatives == "both-views" else None,
    ) * (2 * tau if times_2tau else 1)  # fmt: skip
    slow.backward()

    assert_close(fast.loss.detach().double(), slow.detach(), dtype)
    assert_close(z1_fast.grad.double(), z1_slow.grad, dtype)
    expected = torch.zeros_like(y1_slow) if y1_slow.grad is None else y1_slow.grad
    actual = torch.zeros_like(y1_fast) if y1_fast.grad is None else y1_fast.grad
    assert_close(actual.double(), expected, dtype)


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 6),
    queued=st.integers(0, 40),
    images=st.integers(1, 9),
    k=st.integers(1, 8),
    block=st.sampled_from([2, 3, 64]),
)
@settings(max_examples=200)
def test_the_search_equals_sorting_all_candidates(seed, n, queued, images, k, block):
    generator = torch.Generator().manual_seed(seed)
    y2, c = unit_vectors(generator, n, 5), unit_vectors(generator, queued, 5)
    ids = torch.randint(images, (n,), generator=generator)
    candidate_ids = torch.randint(images, (queued,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:  # small tiles, so that small inputs span several
        patch.setattr(kernels, "_TOPK_BLOCK", block)
        patch.setattr(kernels, "_TOPK_BUFFER", 64)
        patch.setattr(kernels, "_TOPK_MIN_ROWS", 2)
        found = nearest_neighbors(y2, c, k, ids=ids, candidate_ids=candidate_ids)
    expected = naive.search(y2, c, k, ids.tolist(), candidate_ids.tolist())
    for row, want in enumerate(expected):
        got = found.index[row].tolist()
        assert got == want + [-1] * (k - len(want))
        assert torch.equal(found.mask[row], torch.tensor([i < len(want) for i in range(k)]))
        for rank, candidate in enumerate(want):
            assert float(found.similarity[row, rank]) == pytest.approx(float(y2[row] @ c[candidate]), abs=1e-12)


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 9),
    first=st.integers(1, 9),
    second=st.integers(0, 20),
    scale=st.sampled_from([1.0, 300.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@example(seed=233659, n=5, first=5, second=5, scale=300.0, dtype=torch.float32)  # two of the largest nearly equal
@settings(max_examples=100)
def test_the_streaming_logsumexp_equals_the_direct_one(seed, n, first, second, scale, dtype):
    """At scale 300 the exponentials would overflow without a running maximum."""
    generator = torch.Generator().manual_seed(seed)
    z = (unit_vectors(generator, n, 4) * scale).to(dtype).requires_grad_()
    a, b = unit_vectors(generator, first, 4).to(dtype), unit_vectors(generator, 30, 4).to(dtype)
    index = torch.randperm(30, generator=generator)[:second]
    count = torch.randint(1, 9, (second,), generator=generator)
    weight = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_LSE_TILE", {"cpu": (2, 3)})
        fast = kernels.logsumexp(z, [kernels.Keys(a), kernels.Keys(b, index, count)], 0.2)
        fast.backward(weight)
    z_slow = z.detach().double().requires_grad_()
    keys = torch.cat([a, b[index].repeat_interleave(count, dim=0)]).double()
    logits = z_slow @ keys.T / 0.2
    slow = torch.logsumexp(logits, dim=1)
    slow.backward(weight.double())
    assert_close(fast.detach().double(), slow.detach(), dtype)
    # A dot product of four terms has an absolute error of about 4 eps; its exponential has that as its relative error.
    relative = 4 * torch.finfo(dtype).eps * float(logits.detach().abs().max())
    assert_close(z.grad.double(), z_slow.grad, dtype, rounding=relative * float(weight.abs().max()) / 0.2)


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 7),
    queued=st.integers(1, 20),
    k=st.integers(1, 6),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
    form=st.sampled_from(FORMS),
    sides=st.sampled_from(["both", "positives"]),
    gamma=st.sampled_from([1.0, "max", "pull"]),
    temperature=st.sampled_from([0.05, 1.0]),
    hard=st.booleans(),
)
@settings(max_examples=200)
def test_a_neighbor_is_pulled_if_the_gradient_of_its_logit_is_negative(
    seed, n, queued, k, spread, tau, form, sides, gamma, temperature, hard
):
    """The sign is that of autograd on the naive loss; with gamma "pull" every neighbor is pulled.

    A small `spread` makes candidates that are neighbors of many rows, and a low loss.
    """
    gamma = 1.0 if gamma == "pull" and form == "outside" else gamma
    generator = torch.Generator().manual_seed(seed)
    center = unit_vectors(generator, 1, 5)
    y1, z1, y2, c = (
        F.normalize(center + spread * unit_vectors(generator, size, 5), dim=1) for size in (n, n, n, queued)
    )
    criterion = SoftNeighborLoss(
        5, queued, neighbors=k, temperature=tau, loss_form=form, sides=sides, gamma=gamma,
        attention_temperature=temperature, neighbor_weights="hard" if hard else "soft", queue_dtype=torch.float64,
    )  # fmt: skip
    criterion.queue.push(c, torch.arange(100, 100 + queued))
    found = criterion(y1, z1, y2, torch.arange(n))
    picks = [[int(c) for c in row if c >= 0] for row in found.neighbors.index]
    for row in range(n):
        keys = criterion.queue.candidates.clone().requires_grad_()
        w = list(found.w[row, : len(picks[row])])
        naive.soft_neighbor_row(z1, y2, keys, picks, w, row, tau, form, sides).backward()
        # The gradient of a candidate is z1/τ times that of its logit.
        slope = (keys.grad @ z1[row])[picks[row]]
        pulled = found.pulled[row, : len(picks[row])]
        clear = slope.abs() > 1e-12 * max(1.0, float(slope.abs().max()))
        assert torch.equal(pulled[clear], slope[clear] < 0)
        assert not found.pulled[row, len(picks[row]) :].any()
        if gamma == "pull" and not hard:
            assert pulled.all()
            assert (slope < 0)[clear].all()


@pytest.mark.parametrize("matched", [False, True])
def test_only_weights_that_would_push_are_raised(matched):
    """At the high loss of random predictions every neighbor is pulled; at a low loss most are pushed away."""
    generator = torch.Generator().manual_seed(6)
    y1, z1, y2, c = (unit_vectors(generator, size, 6) for size in (64, 64, 64, 300))
    found = {}
    for gamma in (1.0, "pull"):
        criterion = SoftNeighborLoss(6, 300, neighbors=10, temperature=0.1, gamma=gamma, queue_dtype=torch.float64)
        criterion.queue.push(c, torch.arange(100, 400))
        found[gamma] = criterion(y1, y2 if matched else z1, y2, torch.arange(64))
    before, after = found[1.0], found["pull"]
    assert (before.pulled.double().mean() < 0.5) == matched
    assert after.pulled.all()
    raised = after.w > before.w
    assert raised[~before.pulled].all()
    assert (raised.double().mean() > 0.5) == matched
    assert torch.equal(after.w[~raised], before.w[~raised])


def test_the_loss_of_one_ranks_rows_equals_those_rows_of_the_whole_batch():
    generator = torch.Generator().manual_seed(3)
    z1, y2, c = unit_vectors(generator, 8, 6), unit_vectors(generator, 8, 6), unit_vectors(generator, 40, 6)
    index = nearest_neighbors(y2, c, 5).index
    w = positiveness(z1, c[index])
    for sides in SIDES:
        whole = soft_neighbor_loss(z1, y2, c, index, w, sides=sides, reduction="none")
        part = soft_neighbor_loss(
            z1[2:5], y2[2:5], c, index[2:5], w[2:5], sides=sides, batch_y2=y2, batch_index=index, reduction="none"
        )
        assert torch.allclose(part, whole[2:5], atol=1e-12, rtol=0)


def test_without_neighbors_the_loss_is_eq_1():
    generator = torch.Generator().manual_seed(4)
    z1, y2 = unit_vectors(generator, 5, 6), unit_vectors(generator, 5, 6)
    expected = torch.stack([naive.contrastive_row(z1, y2, n, 0.2) for n in range(5)]).mean()
    criterion = SoftNeighborLoss(dim=6, queue_length=16, neighbors=3, queue_dtype=torch.float64)
    assert torch.allclose(contrastive_loss(z1, y2), expected, atol=1e-12)
    assert torch.allclose(criterion(z1, z1, y2, torch.arange(5)).loss, expected, atol=1e-12)  # an empty queue
    criterion.queue.push(unit_vectors(generator, 16, 6), torch.arange(100, 116))
    with_neighbors = criterion(z1, z1, y2, torch.arange(5)).loss
    assert abs(float(with_neighbors - expected)) > 0.1
    assert torch.allclose(criterion(z1, z1, y2, torch.arange(5), use_neighbors=False).loss, expected, atol=1e-12)


def test_learned_attention_starts_as_the_identity_and_learns():
    generator = torch.Generator().manual_seed(5)
    y1, z1, y2, c = (unit_vectors(generator, size, 6) for size in (5, 5, 5, 20))
    losses = {}
    for attention in ("identity", "linear"):
        criterion = SoftNeighborLoss(
            6,
            20,
            SoftNeighborConfig(neighbors=3, attention=attention, attention_gradient=True),
            queue_dtype=torch.float64,
        ).double()
        criterion.queue.push(c, torch.arange(100, 120))
        losses[attention] = criterion(y1, z1, y2, torch.arange(5)).loss
    losses["linear"].backward()
    assert torch.allclose(losses["identity"], losses["linear"], atol=1e-12)
    assert criterion.f1.weight.grad.abs().max() > 0
    assert criterion.f2.weight.grad.abs().max() > 0
