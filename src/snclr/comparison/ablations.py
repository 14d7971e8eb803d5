"""The paper's five ablation tables as rows of a study, scaled to the data at hand by rules that are stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snclr.comparison.plan import Entry
from snclr.comparison.study import Data
from snclr.config import PretrainConfig
from snclr.errors import UserError

PAPER_NEIGHBORS = (10, 30, 50)
PAPER_SAME_CLASS = 128
"""Entries of an image's own class that the paper's queue holds on average: 128,000 features of 1,000 classes."""
HALVINGS = 4
"""The paper's queue lengths are its longest (128,000) and this many halvings of it, down to 8,000."""

TABLES: dict[str, str] = {
    "positiveness": "no neighbours, hard neighbours (all fully positive), soft neighbours (Eq. 4)",
    "neighbors": "numbers of neighbours K",
    "queue": "lengths of the queue Q",
    "sides": "neighbours among the positives, the negatives, both, neither",
    "cost": "seconds a step and memory against the length of the queue",
}
RULES: dict[str, str] = {
    "positiveness": "K and Q are the run's own (--neighbors, --queue-length, or the recipe's)",
    "neighbors": "the paper's K = 10, 30, 50; where the queue holds fewer than the paper's 128 entries of an image's"
    " own class on average, in proportion fewer (at least 1)",
    "queue": "the run's own Q, or the number of images where that is less, and four halvings of it, as 128,000 to 8,000"
    " in the paper; at least K",
    "sides": "K and Q are the run's own (--neighbors, --queue-length, or the recipe's)",
    "cost": "the lengths of the table queue; every queue is full; the first row has no neighbours and a queue of one",
}
NONE = Entry("no neighbours", {"method": "snclr", "sides": "neither"})


def ablation(
    table: str, config: PretrainConfig, data: Data, values: Sequence[int] | None = None
) -> tuple[list[Entry], str]:
    """Rows of one table, the row without neighbours first as in the paper, and the rule in words with its numbers.

    `values` replaces the rule for K (neighbors) or Q (queue, cost).
    """
    if table not in TABLES:
        raise UserError(f"--table must be one of {', '.join(TABLES)}, not {table!r}")
    if values is not None and (table not in ("neighbors", "queue", "cost") or not values or min(values) < 1):
        raise UserError(
            f"--values {values}: the tables neighbors, queue and cost take a list of numbers from 1 on, e.g. 10,30,50"
        )
    k, rule = config.neighbors, RULES[table] if values is None else "rows as given by --values"
    if table == "positiveness":
        rows = [_row(f"hard, K = {k}", weights="hard"), _row(f"soft, K = {k}", weights="soft")]
        return [NONE, *rows], f"{rule}: K = {k}, Q = {config.queue_length:,}"
    if table == "sides":
        named = {"positives only": "positives", "negatives only": "negatives", "both": "both"}
        return [NONE, *(_row(label, sides=side) for label, side in named.items())], (
            f"{rule}: K = {k}, Q = {config.queue_length:,}"
        )
    if table == "neighbors":
        counts = list(values) if values else _neighbor_counts(config, data)
        return [NONE, *(_row(f"K = {n}", neighbors=n) for n in counts)], (
            f"{rule}: {_expected(config, data)}Q = {config.queue_length:,}"
        )
    lengths = list(values) if values else queue_lengths(config, data)
    if max(lengths) < k:
        raise UserError(f"all queues ({lengths}) are shorter than K = {k}: give a lower --neighbors or longer --values")
    shares = f"{lengths[0] / data.images:.1%} to {lengths[-1] / data.images:.1%} of the {data.images:,} images"
    rows = [_row(f"Q = {length:,}", queue_length=length) for length in lengths]
    first = Entry("no neighbours", {**NONE.settings, "queue_length": 1}) if table == "cost" else NONE
    return [first, *rows], f"{rule}: {shares} (the paper: 0.6 % to 10 %), K = {k}"


def queue_lengths(config: PretrainConfig, data: Data) -> list[int]:
    """The longest and its halvings, shortest first; none below K, none twice."""
    longest = min(config.queue_length, data.images)
    lengths = {max(longest // 2**i, config.neighbors) for i in range(HALVINGS + 1)}
    return sorted(lengths)


def _neighbor_counts(config: PretrainConfig, data: Data) -> list[int]:
    expected = _same_class_entries(config, data)
    scale = 1.0 if expected is None else min(1.0, expected / PAPER_SAME_CLASS)
    return sorted({max(1, round(n * scale)) for n in PAPER_NEIGHBORS})


def _same_class_entries(config: PretrainConfig, data: Data) -> float | None:
    """How many entries of a full queue are of an image's own class, on average; None without labels."""
    return None if data.same_class is None else data.same_class * min(config.queue_length, data.images)


def _expected(config: PretrainConfig, data: Data) -> str:
    expected = _same_class_entries(config, data)
    return "no labels, so not scaled; " if expected is None else f"here {expected:,.0f} of them are expected; "


def _row(label: str, **settings: Any) -> Entry:
    return Entry(label, {"method": "snclr", **settings})
