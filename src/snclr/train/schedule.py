"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def warmup_cosine(
    step: int, *, total_steps: int, warmup_steps: int, peak: float, start: float = 1e-6, end: float = 0.0
) -> float:
    """Return the learning rate of `step`: linear warm-up from `start` to `peak`, then a cosine to `end`.

    `peak` is reached at step `warmup_steps` exactly and `end` at `total_steps`, after which it stays. A `start` above
    `peak` is replaced by `peak`, so that the warm-up never decreases.

    >>> [round(warmup_cosine(s, total_steps=10, warmup_steps=2, peak=1.0, start=0.0), 3) for s in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if step >= total_steps:
        return end
    if step < warmup_steps:
        first = min(start, peak)
        return first + (peak - first) * step / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return end + (peak - end) * (1.0 + math.cos(math.pi * progress)) / 2.0
