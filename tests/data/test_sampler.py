"""The order of images and the random numbers of views are pure functions with the statistics of random ones."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from snclr.data.sampler import ORDER, REPLACEMENT, batch_ids, epoch_order, steps_per_epoch, uniforms
from snclr.errors import UserError

GOLDEN = (
    [0.47141042966848024, 0.7247520786262142],
    [0.3805953344315448, 0.10378527813930127],
    [4, 2, 1, 0, 5, 6, 7, 3],
)

int64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@given(length=st.integers(0, 300), seed=int64, epoch=st.integers(0, 10**6))
@settings(max_examples=50)
def test_an_epoch_visits_every_image_once(length, seed, epoch):
    order = epoch_order(length, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))
    assert np.array_equal(order, epoch_order(length, seed, epoch))


def test_orders_differ_between_epochs_and_seeds_without_correlation():
    orders = [epoch_order(20_000, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    places = np.stack([np.argsort(order) for order in orders])
    correlation = np.corrcoef(np.vstack([places, np.arange(20_000)])) - np.eye(7)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


def test_numbers_do_not_change_between_versions():
    # A changed number would silently change every run: these are the definition.
    assert uniforms(0, 0, np.array([0]), 0, 2)[0].tolist() == pytest.approx(GOLDEN[0], abs=0)
    assert uniforms(-3, 7, np.array([123456]), 1, 2)[0].tolist() == pytest.approx(GOLDEN[1], abs=0)
    assert epoch_order(8, 1, 2).tolist() == GOLDEN[2]


@given(
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    seed=int64,
    epoch=st.integers(0, 10**6),
    view=st.integers(-2, 9),
    count=st.integers(1, 40),
)
@settings(max_examples=50)
def test_a_row_depends_on_its_own_key_alone(ids, seed, epoch, view, count):
    batch = uniforms(seed, epoch, np.array(ids), view, count)
    for row, index in enumerate(ids):
        assert np.array_equal(batch[row : row + 1], uniforms(seed, epoch, np.array([index]), view, count))
    assert np.array_equal(batch, uniforms(seed, epoch, np.array(ids), view, count + 3)[:, :count])


def _tables():
    """The same number of draws, varying one coordinate along the rows each time."""
    n = 4096
    ids = np.arange(n)
    yield "ids", uniforms(0, 0, ids, 0, 33)
    yield "far ids", uniforms(0, 0, ids * 65_536, 0, 33)
    yield "epochs", np.vstack([uniforms(0, epoch, np.array([0]), 0, 33) for epoch in range(n)])
    yield "seeds", np.vstack([uniforms(seed, 0, np.array([5]), 0, 33) for seed in range(n)])
    yield "views", np.vstack([uniforms(0, 0, np.array([5]), view, 33) for view in range(n)])


@pytest.mark.parametrize(("name", "table"), list(_tables()), ids=lambda value: value if isinstance(value, str) else "")
def test_numbers_are_uniform_and_independent(name, table):
    n, count = table.shape
    assert table.min() >= 0
    assert table.max() < 1
    # Uniform: chi-squared over 64 cells, all columns together, within 5 standard deviations of its mean.
    cells = np.bincount((table * 64).astype(int).ravel(), minlength=64)
    chi = ((cells - table.size / 64) ** 2 / (table.size / 64)).sum()
    assert abs(chi - 63) < 5 * np.sqrt(2 * 63)
    # Independent: columns of each other, and neighboring rows of each other.
    correlation = np.corrcoef(table.T) - np.eye(count)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    rows = np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]
    assert abs(rows) < 5 / np.sqrt(table.size)
    assert len(np.unique(table)) == table.size


def test_coordinates_are_not_interchangeable():
    draws = {
        key: tuple(uniforms(key[0], key[1], np.array([key[2]]), key[3], 3)[0])
        for key in [
            (s, e, i, v) for s in range(3) for e in range(3) for i in range(3) for v in (ORDER, REPLACEMENT, 0, 1)
        ]
    }
    numbers = [number for draw in draws.values() for number in draw]
    assert len(set(numbers)) == len(numbers)


@given(length=st.integers(1, 60), data=st.data())
@settings(max_examples=50)
def test_batches_follow_the_epoch_order_and_drop_the_last_one(length, data):
    batch = data.draw(st.integers(1, length))
    epoch = data.draw(st.integers(0, 5))
    per_epoch = steps_per_epoch(length, batch)
    assert per_epoch == length // batch
    got = [batch_ids(length, batch, 3, epoch * per_epoch + row) for row in range(per_epoch)]
    assert {at for at, _ in got} == {epoch}
    assert np.array_equal(np.concatenate([ids for _, ids in got]), epoch_order(length, 3, epoch)[: per_epoch * batch])


def test_the_cached_order_is_read_only():
    _, ids = batch_ids(10, 5, 0, 0)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 99


@pytest.mark.parametrize(
    ("length", "batch", "message"), [(7, 8, "7 images.*batch of 8.*at most 7"), (7, 0, "at least 1")]
)
def test_too_few_images_for_a_batch_is_an_error(length, batch, message):
    with pytest.raises(UserError, match=message):
        batch_ids(length, batch, 0, 0)
