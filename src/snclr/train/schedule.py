"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from snclr.errors import UserError


def warmup_cosine(
    step: int, *, total_steps: int, warmup_steps: int, peak: float, start: float = 1e-6, end: float = 0.0
) -> float:
    """Return the learning rate of ``step``: a straight line from ``start`` to ``peak``, then half a cosine to ``end``.

    ``peak`` is reached at step ``warmup_steps`` exactly and ``end`` at ``total_steps``, which also holds afterwards.
    A ``start`` above ``peak`` is taken as ``peak``, so that the warm-up never falls.

    >>> [round(warmup_cosine(s, total_steps=10, warmup_steps=2, peak=1.0, start=0.0), 3) for s in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check(step, total_steps, warmup_steps, peak, start, end)
    if step >= total_steps:
        return end
    if step < warmup_steps:
        first = min(start, peak)
        return first + (peak - first) * step / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return end + (peak - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _check(step: int, total_steps: int, warmup_steps: int, peak: float, start: float, end: float) -> None:
    """Raise a UserError for settings no schedule can follow."""
    if total_steps < 1 or step < 0:
        raise UserError(f"Step {step} of {total_steps} is not a training step; train for at least one step.")
    if warmup_steps < 0:
        raise UserError(f"The warm-up is {warmup_steps} steps; it must be 0 or more.")
    if warmup_steps > total_steps:
        raise UserError(
            f"The warm-up ({warmup_steps} steps) is longer than the whole training ({total_steps} steps). "
            "Train for more epochs or shorten the warm-up."
        )
    if not (0.0 <= end <= peak < math.inf and 0.0 <= start < math.inf):
        raise UserError(
            f"A learning rate from {start} over {peak} to {end} is not possible: all must be finite and not negative, "
            "and the end must not lie above the peak."
        )
