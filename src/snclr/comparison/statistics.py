"""Mean, spread and paired differences over seeds, with Student's t; plain Python, so that tables need no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation of n values; the deviation is None for one."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Paired:
    """Differences of two rows at equal seeds: by seed, their summary, and a 95 % interval of the mean difference."""

    by_seed: dict[int, float]
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    """None with fewer than two seeds."""

    @property
    def verdict(self) -> str:
        """In plain words: is there a difference?"""
        if self.interval is None:
            return "one seed: nothing can be said"
        if self.sd is not None and self.sd < 1e-9:  # few seeds and few test images: an accident, not certainty
            return "equal at all seeds" if abs(self.mean) < 1e-9 else "no spread over seeds: nothing can be said"
        low, high = self.interval
        return "within noise" if low <= 0 <= high else "higher" if low > 0 else "lower"


def summarise(values: Sequence[float]) -> Summary:
    """Mean and standard deviation (n - 1) of at least one value.

    >>> summarise([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    """
    n = len(values)
    mean = math.fsum(values) / n
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    return Summary(mean, sd, n)


def paired(row: Mapping[int, float], first: Mapping[int, float]) -> Paired | None:
    """`row` minus `first` at each seed both have, with Student's 95 % interval; None where they share no seed.

    Pairing takes out what a seed does to both rows (the order of the images, their views, the first weights).

    >>> paired({0: 0.7, 1: 0.8}, {0: 0.6, 1: 0.6, 2: 0.9}).verdict
    'within noise'
    """
    by_seed = {seed: row[seed] - first[seed] for seed in sorted(row) if seed in first}
    if not by_seed:
        return None
    found = summarise(list(by_seed.values()))
    interval = None
    if found.sd is not None:
        half = t_quantile(0.5 + CONFIDENCE / 2, found.n - 1) * found.sd / math.sqrt(found.n)
        interval = (found.mean - half, found.mean + half)
    return Paired(by_seed, found.mean, found.sd, interval)


def t_quantile(p: float, freedom: int) -> float:
    """The point that Student's t with `freedom` degrees stays below with probability p, for 0.5 <= p < 1.

    >>> round(t_quantile(0.975, 2), 3)
    4.303
    """
    assert 0.5 <= p < 1, p
    assert freedom >= 1, freedom
    low, high = 0.0, math.pi / 2  # in the angle, where the whole line is one short stretch
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + _within(middle, freedom) / 2 < p else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) · tan angle): for whole degrees of freedom it is a finite sum of powers of the cosine."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for i in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= cosine * cosine * i / (i + 1)
    if freedom % 2:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
