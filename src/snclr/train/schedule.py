"""Learning rate and weight decay as pure functions of the step, so that a resumed run needs no scheduler state."""

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


def cosine(step: int, *, total_steps: int, start: float, end: float) -> float:
    """Return the value of `step` on a cosine from `start` to `end`, which is reached at `total_steps`.

    >>> [round(cosine(s, total_steps=10, start=0.04, end=0.4), 2) for s in (0, 5, 10)]
    [0.04, 0.22, 0.4]
    """
    return warmup_cosine(step, total_steps=total_steps, warmup_steps=0, peak=start, end=end)
