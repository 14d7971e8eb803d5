from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from snclr.studies.tables import paired, summarize


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_mean_and_deviation_match_numpy(values):
    result = summarize(values)
    assert result["mean"] == pytest.approx(np.mean(values))
    assert result["sd"] == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert result["n"] == len(values)


def test_one_value_has_no_deviation():
    assert summarize([0.5])["sd"] is None


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9))
def test_the_paired_interval_matches_the_formula(pairs):
    a, b = np.array(pairs).T
    result = paired(dict(enumerate(a)), dict(enumerate(b)))
    half = stats.t.ppf(0.975, len(a) - 1) * np.std(a - b, ddof=1) / np.sqrt(len(a))
    assert result["interval"] == pytest.approx((np.mean(a - b) - half, np.mean(a - b) + half), abs=1e-12)


def test_only_common_seeds_are_paired():
    result = paired({0: 0.7, 2: 0.9}, {0: 0.6, 1: 0.1, 2: 0.8})
    assert list(result["by_seed"]) == [0, 2]
    assert result["mean"] == pytest.approx(0.1)
    assert paired({0: 0.7}, {1: 0.7}) is None


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({0: 0.71, 1: 0.69, 2: 0.70}, "within noise"),
        ({0: 0.80, 1: 0.801, 2: 0.799}, "higher"),
        ({0: 0.60, 1: 0.601, 2: 0.599}, "lower"),
        ({0: 0.8, 1: 0.8}, "no variance over seeds: inconclusive"),
        ({0: 0.7, 1: 0.7}, "equal at all seeds"),
        ({0: 0.9}, "one seed: inconclusive"),
    ],
)
def test_verdicts(row, verdict):
    assert paired(row, {0: 0.7, 1: 0.7, 2: 0.7})["verdict"] == verdict
