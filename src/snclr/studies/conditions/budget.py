"""Equal budgets: optimizer steps, images seen or seconds. Every row trains the whole epochs nearest to the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snclr.errors import UserError, did_you_mean
from snclr.train.config import resolve

KINDS = ("steps", "images", "seconds")
CALIBRATION_STEPS = 20
"""Steps that are measured for each row if the budget is in seconds."""
USUAL_VIEWS = 2
"""Full views per image that `--epochs` stand for in a budget of images seen."""


@dataclass(frozen=True)
class Budget:
    """What is equal for all rows, and how much of it (None: what `--epochs` amount to)."""

    kind: str = "steps"
    amount: float | None = None

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}={self.amount:g}"


def parse_budget(text: str | None) -> Budget:
    """Parse `steps`, `images` or `seconds`, or one of them with an amount.

    >>> parse_budget("seconds=600")
    Budget(kind='seconds', amount=600.0)
    """
    kind, equals, number = (text or "steps").partition("=")
    kind = kind.strip()
    if kind not in KINDS:
        raise UserError(f"--budget must be one of {', '.join(KINDS)}, not {kind!r}{did_you_mean(kind, KINDS)}")
    if not equals:
        return Budget(kind)
    try:
        amount = float(number.replace("_", ""))
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise UserError(f"--budget {text}: the amount must be a positive number, e.g. {kind}=600")
    return Budget(kind, amount)


def images_seen_per_step(given: Mapping[str, Any]) -> float:
    """Return the images seen in a step: the views of the batch, each counted by its share of a full view's pixels.

    Two views count 2 for each image of the batch; six small views of 96 pixels beside two of 224 add 6 × (96/224)².
    A view that passes two networks counts once.
    """
    from snclr.train.build import view_sizes

    config = resolve(given)
    return config.batch_size * sum((size / config.image_size) ** 2 for size in view_sizes(config))


def measured_seconds(record: Mapping[str, Any]) -> float:
    """Return the seconds per step of a calibration: CPU seconds of the process, on a GPU wall time with data."""
    cost = record["cost"]
    on_cpu = record["where"].get("accelerator", "cpu") == "cpu"
    return float(cost["cpu_seconds_per_step"] if on_cpu else cost["seconds_with_views"])


def nearest_epochs(amount: float, per_step: float, steps_per_epoch: int) -> int:
    """Return the whole epochs, at least one, whose cost is nearest to the amount.

    >>> nearest_epochs(1000, per_step=2.0, steps_per_epoch=46)
    11
    """
    return max(1, round(amount / (per_step * steps_per_epoch)))
