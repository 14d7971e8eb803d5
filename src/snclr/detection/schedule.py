"""The settings of a fine-tuning, the named ones among them, and the learning rate as a function of the step.

"1x" is the field's: 90,000 iterations of 16 images, learning rate 0.02, divided by 10 after 60,000 and 80,000, a linear
warm-up over 1,000, SGD with momentum 0.9 and weight decay 1e-4, short side 640 to 800 in steps of 32, long side 1333.
Other lengths keep its proportions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from snclr.errors import UserError

BASE_BATCH = 16
WARMUP_FACTOR = 0.001
WARMUP_MOST = 1000


@dataclass(frozen=True, kw_only=True)
class DetectSettings:
    """All that decides what a fine-tuning computes, besides weights and data."""

    iterations: int = 90_000
    batch_size: int = 16
    """Images of all processes together."""
    lr: float = 0.02
    """The rate for 16 images; the rate used is this × batch/16."""
    short_side: tuple[int, int] = (640, 800)
    """Range of the short side in training; tests use the larger."""
    long_side: int = 1333
    width: int = 256
    """Channels of the feature pyramid; the heads follow (the box head has four times as many)."""
    rois: int = 512
    """Regions an image that train the box head."""
    proposals: int = 2000
    """Proposals an image, before and after suppression, in training; tests use half."""
    anchor: int = 32
    """Side of the smallest anchors; each further level doubles it."""
    weight_decay: float = 1e-4
    momentum: float = 0.9
    keep_empty: bool = False
    """Train on images without objects too."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("iterations", "batch_size", "long_side", "width", "rois", "proposals", "anchor"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name in ("lr", "weight_decay", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a finite number of 0 or more")
        low, high = self.short_side
        if not 32 <= low <= high <= self.long_side:
            raise UserError(
                f"the short side is {low} to {high} and the long side at most {self.long_side}; needed are "
                "32 <= short sides <= long side, such as --short-side 640-800 --long-side 1333"
            )

    @property
    def milestones(self) -> tuple[int, int]:
        """After how many iterations the rate is divided by 10: 60,000 and 80,000 of 90,000, and in proportion."""
        return round(self.iterations * 2 / 3), round(self.iterations * 8 / 9)

    @property
    def warmup(self) -> int:
        """Iterations of the linear warm-up: 1,000, or a tenth of a short schedule."""
        return min(WARMUP_MOST, self.iterations // 10)

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up: linear in the batch."""
        return self.lr * self.batch_size / BASE_BATCH


RECIPES: dict[str, DetectSettings] = {
    "1x": DetectSettings(),
    "2x": DetectSettings(iterations=180_000),
    "cpu": DetectSettings(
        iterations=300, batch_size=4, lr=0.08, short_side=(160, 192), long_side=320, width=64, rois=64, proposals=300,
        anchor=16,
    ),
}  # fmt: skip
"""Settings by name. `cpu` is for a narrow ResNet and a small set of photographs: a small detector, in minutes."""


def resolve(recipe: str = "1x", **given: Any) -> DetectSettings:
    """A recipe with the given settings (those that are not None) in place of its own.

    >>> resolve("1x", iterations=900).milestones
    (600, 800)
    """
    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe!r} for detection; choose one of {', '.join(RECIPES)}")
    return replace(RECIPES[recipe], **{name: value for name, value in given.items() if value is not None})


def learning_rate(step: int, settings: DetectSettings) -> float:
    """The rate of a step (from 0): warm-up from a thousandth, then the peak, a tenth and a hundredth of it.

    >>> s = DetectSettings()
    >>> [round(learning_rate(step, s), 6) for step in (0, 500, 1000, 59_999, 60_000, 80_000)]
    [2e-05, 0.01001, 0.02, 0.02, 0.002, 0.0002]
    """
    factor = 1.0
    if step < settings.warmup:
        factor = WARMUP_FACTOR + (1 - WARMUP_FACTOR) * step / settings.warmup
    tenths = sum(step >= milestone for milestone in settings.milestones)
    return settings.peak_lr * factor * 0.1**tenths


def short_sides(settings: DetectSettings) -> tuple[int, ...]:
    """The short sides that training draws from: six, equally spaced.

    >>> short_sides(DetectSettings())
    (640, 672, 704, 736, 768, 800)
    """
    low, high = settings.short_side
    return tuple(sorted({round(low + (high - low) * part / 5) for part in range(6)}))


def parse_short_side(text: str) -> tuple[int, int]:
    """`640-800` or one number, as the flag gives it.

    >>> parse_short_side("640-800"), parse_short_side("320")
    ((640, 800), (320, 320))
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise UserError(f"--short-side {text!r} is neither a number of pixels nor a range such as 640-800")
    return int(parts[0]), int(parts[-1])
