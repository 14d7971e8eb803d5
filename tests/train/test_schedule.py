import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snclr.train.schedule import warmup_cosine


def test_rates_match_the_formula():
    rates = [warmup_cosine(s, total_steps=110, warmup_steps=10, peak=4.8, start=1e-6) for s in (0, 5, 10, 35, 60, 110)]
    expected = [1e-6, (4.8 + 1e-6) / 2, 4.8, 2.4 * (1 + math.cos(math.pi / 4)), 2.4, 0.0]
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_start_peak_and_end_are_exact():
    settings = {"total_steps": 7, "warmup_steps": 3, "peak": 0.3, "start": 0.0, "end": 0.01}
    assert warmup_cosine(0, **settings) == 0.0
    assert warmup_cosine(3, **settings) == 0.3
    assert warmup_cosine(7, **settings) == 0.01
    assert warmup_cosine(1000, **settings) == 0.01


def test_without_warmup_the_first_rate_is_the_peak():
    assert warmup_cosine(0, total_steps=5, warmup_steps=0, peak=0.5) == 0.5


def test_warmup_may_be_as_long_as_the_training():
    assert warmup_cosine(4, total_steps=5, warmup_steps=5, peak=1.0, start=0.0) == pytest.approx(0.8)


@given(
    total=st.integers(1, 5000),
    peak=st.floats(1e-9, 1e3),
    start=st.floats(0, 1),
    end_share=st.floats(0, 1),
    data=st.data(),
)
def test_rates_rise_then_fall_within_bounds(total, peak, start, end_share, data):
    warmup = data.draw(st.integers(0, total))
    step = data.draw(st.integers(0, total - 1))
    end = peak * end_share
    settings = {"total_steps": total, "warmup_steps": warmup, "peak": peak, "start": start, "end": end}
    now, then = warmup_cosine(step, **settings), warmup_cosine(step + 1, **settings)
    slack = 1e-12 * peak
    assert min(start, end, peak) - slack <= now <= peak + slack
    if step + 1 <= warmup and step + 1 < total:
        assert now <= then + slack
    if step >= warmup:
        assert now >= then - slack
