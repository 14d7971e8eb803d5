"""Mean, standard deviation and paired differences over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation of n values; sd is None for one value."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Paired:
    """Differences of two rows at equal seeds, with the 95 % confidence interval of their mean (None for one seed)."""

    by_seed: dict[int, float]
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    verdict: str
    """Whether the difference is significant."""


def summarize(values: Sequence[float]) -> Summary:
    """Return mean and standard deviation (n - 1) of at least one value.

    >>> summarize([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    """
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired(row: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Return `row` minus `baseline` at their common seeds, with Student's t interval; None without a common seed.

    Pairing removes what a seed does to both rows: image order, views and initial weights.

    >>> paired({0: 0.7, 1: 0.8}, {0: 0.6, 1: 0.6, 2: 0.9}).verdict
    'within noise'
    """
    by_seed = {seed: row[seed] - baseline[seed] for seed in sorted(row) if seed in baseline}
    if not by_seed:
        return None
    summary = summarize(list(by_seed.values()))
    mean, sd = summary.mean, summary.sd
    if sd is None:
        return Paired(by_seed, mean, sd, None, "one seed: inconclusive")
    from scipy.stats import t

    half = float(t.ppf(0.5 + CONFIDENCE / 2, summary.n - 1)) * sd / math.sqrt(summary.n)
    low, high = mean - half, mean + half
    if sd < 1e-9:  # with few seeds and test images zero variance is a coincidence
        verdict = "equal at all seeds" if abs(mean) < 1e-9 else "no variance over seeds: inconclusive"
    else:
        verdict = "within noise" if low <= 0 <= high else "higher" if low > 0 else "lower"
    return Paired(by_seed, mean, sd, (low, high), verdict)
