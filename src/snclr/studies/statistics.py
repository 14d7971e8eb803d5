"""Mean, standard deviation and paired differences over seeds, as values for JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation (n - 1) and number of values; sd is None for one value.

    >>> summarize([1.0, 2.0, 3.0])
    {'mean': 2.0, 'sd': 1.0, 'n': 3}
    """
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}


def paired(row: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any] | None:
    """Return `row` minus `baseline` at their common seeds: mean, sd, 95 % Student's t interval and verdict.

    Pairing removes what a seed does to both rows: image order, views and initial weights. None without a common seed.

    >>> paired({0: 0.7, 1: 0.8}, {0: 0.6, 1: 0.6, 2: 0.9})["verdict"]
    'within noise'
    """
    by_seed = {seed: row[seed] - baseline[seed] for seed in sorted(row) if seed in baseline}
    if not by_seed:
        return None
    summary = summarize(list(by_seed.values()))
    mean, sd, n = summary["mean"], summary["sd"], summary.pop("n")
    result = {"by_seed": by_seed, **summary, "interval": None, "verdict": "one seed: inconclusive"}
    if sd is None:
        return result
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    low, high = mean - half, mean + half
    if sd < 1e-9:  # with few seeds and test images zero variance is a coincidence
        verdict = "equal at all seeds" if abs(mean) < 1e-9 else "no variance over seeds: inconclusive"
    else:
        verdict = "within noise" if low <= 0 <= high else "higher" if low > 0 else "lower"
    return {**result, "interval": (low, high), "verdict": verdict}
