"""The paper's five ablation tables as rows of a study, scaled to the dataset by fixed rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snclr.data.info import DatasetInfo
from snclr.errors import UserError
from snclr.studies.runs import Row
from snclr.train.config import PretrainConfig

PAPER_NEIGHBORS = (10, 30, 50)
PAPER_ENTRIES_PER_CLASS = 128
"""Mean number of queue entries of an image's class in the paper: 128,000 features of 1,000 classes."""
HALVINGS = 4
"""The paper's queue lengths are 128,000 and four halvings of it, down to 8,000."""
TABLES: dict[str, str] = {
    "positiveness": "no neighbors, hard neighbors (all fully positive), soft neighbors (Eq. 4)",
    "neighbors": "number of neighbors K",
    "queue": "queue length Q",
    "sides": "neighbors among the positives, the negatives, both, neither",
    "cost": "seconds per step and memory over the queue length",
}
_OWN_K_AND_Q = "K and Q of the run (--neighbors, --queue-length or the recipe)"
RULES: dict[str, str] = {
    "positiveness": _OWN_K_AND_Q,
    "neighbors": "K = 10, 30, 50 as in the paper, scaled down (to at least 1) if the queue holds fewer than the paper's"
    " 128 entries of an image's class on average",
    "queue": "the run's Q (at most the number of images) and four halvings (the paper: 128,000 to 8,000), at least K",
    "sides": _OWN_K_AND_Q,
    "cost": "the lengths of the queue table, with full queues; the first row has no neighbors and a queue of length 1",
}
NO_NEIGHBORS = Row("no neighbors", {"method": "snclr", "sides": "neither"})


def ablation_rows(
    table: str, config: PretrainConfig, data: DatasetInfo, values: Sequence[int] | None = None
) -> tuple[list[Row], str]:
    """Return the rows of a table, the one without neighbors first, and the rule with its numbers.

    `values` replaces the rule for K (neighbors) or Q (queue, cost).
    """
    if table not in TABLES:
        raise UserError(f"--table must be one of {', '.join(TABLES)}, not {table!r}")
    if values is not None and (table not in ("neighbors", "queue", "cost") or not values or min(values) < 1):
        raise UserError(
            f"--values {values} is not valid for the table {table}. The tables neighbors, queue and cost take a list of"
            " positive integers, e.g. 10,30,50."
        )
    k, rule = config.neighbors, RULES[table] if values is None else "rows given by --values"
    full_rule = f"{rule}: K = {k}, Q = {config.queue_length:,}"
    if table == "positiveness":
        rows = [_row(f"{weights}, K = {k}", neighbor_weights=weights) for weights in ("hard", "soft")]
        return [NO_NEIGHBORS, *rows], full_rule
    if table == "sides":
        labels = {"positives only": "positives", "negatives only": "negatives", "both": "both"}
        return [NO_NEIGHBORS, *(_row(label, sides=sides) for label, sides in labels.items())], full_rule
    if table == "neighbors":
        expected = None if data.same_class is None else data.same_class * min(config.queue_length, data.images)
        scale = 1.0 if expected is None else min(1.0, expected / PAPER_ENTRIES_PER_CLASS)
        counts = values or sorted({max(1, round(n * scale)) for n in PAPER_NEIGHBORS})
        note = "no labels, not scaled" if expected is None else f"{expected:,.0f} such entries expected here"
        rows = [_row(f"K = {n}", neighbors=n) for n in counts]
        return [NO_NEIGHBORS, *rows], f"{rule}: {note}; Q = {config.queue_length:,}"
    lengths = list(values) if values else queue_lengths(config, data)
    if max(lengths) < k:
        raise UserError(f"all queues ({lengths}) are shorter than K = {k}. Give a lower --neighbors or longer --values")
    shares = f"{lengths[0] / data.images:.1%} to {lengths[-1] / data.images:.1%} of the {data.images:,} images"
    first = Row("no neighbors", {**NO_NEIGHBORS.settings, "queue_length": 1}) if table == "cost" else NO_NEIGHBORS
    rows = [_row(f"Q = {length:,}", queue_length=length) for length in lengths]
    return [first, *rows], f"{rule}: {shares} (the paper: 0.6 % to 10 %), K = {k}"


def queue_lengths(config: PretrainConfig, data: DatasetInfo) -> list[int]:
    """Return the longest queue and its halvings in increasing order, none shorter than K."""
    longest = min(config.queue_length, data.images)
    return sorted({max(longest // 2**i, config.neighbors) for i in range(HALVINGS + 1)})


def _row(label: str, **settings: Any) -> Row:
    return Row(label, {"method": "snclr", **settings})
