"""Settings, recipes and learning rate of a detection training.

"1x" is the standard schedule: 90,000 iterations of 16 images, learning rate 0.02, divided by 10 after 60,000 and
80,000, linear warm-up over 1,000, SGD with momentum 0.9 and weight decay 1e-4, short side 640 to 800 in steps of 32,
long side 1333. Other lengths keep its proportions.
"""

from dataclasses import dataclass, replace
from typing import Any

from snclr.errors import UserError
from snclr.runtime.settings import Count, NonNegative, describe

_WARMUP_FACTOR = 0.001


@dataclass(frozen=True, kw_only=True)
class DetectSettings:
    """Settings that, with weights and data, determine a fine-tuning. The defaults are the recipe 1x."""

    iterations: Count = 90_000
    """Training steps."""
    batch_size: Count = 16
    """Images per step, over all ranks."""
    lr: NonNegative = 0.02
    """Learning rate for 16 images; multiplied by batch size / 16."""
    short_side: tuple[int, int] = (640, 800)
    """Pixels of the short side, or a range to draw from in training, such as 640-800; tests use the maximum."""
    long_side: Count = 1333
    """Maximum pixels of the long side."""
    width: Count = 256
    """Channels of the feature pyramid and the mask head; the box head has four times as many."""
    rois: Count = 512
    """Regions per image that train the box head."""
    proposals: Count = 2000
    """Proposals per image in training, before and after non-maximum suppression; tests use half."""
    anchor: Count = 32
    """Side of the smallest anchors in pixels; each further level doubles it."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of all weights."""
    momentum: NonNegative = 0.9
    """Momentum of SGD."""
    keep_empty: bool = False
    """Also train on images without objects."""
    seed: int = 0
    """Seed of new weights, order, sizes and flips."""

    def __post_init__(self) -> None:
        for name, setting in describe(DetectSettings).items():
            if name != "short_side":
                setting.check(getattr(self, name))
        low, high = self.short_side
        if not 32 <= low <= high <= self.long_side:
            raise UserError(
                f"the short side is {low} to {high} and the long side at most {self.long_side}; give 32 <= short side "
                "<= long side, such as --short-side 640-800 --long-side 1333"
            )

    @property
    def short_sides(self) -> tuple[int, ...]:
        """Short sides that training draws from: six, equally spaced, such as 640, 672 … 800."""
        low, high = self.short_side
        return tuple(sorted({round(low + (high - low) * part / 5) for part in range(6)}))

    @property
    def milestones(self) -> tuple[int, int]:
        """Iterations after which the learning rate is divided by 10."""
        return round(self.iterations * 2 / 3), round(self.iterations * 8 / 9)

    @property
    def warmup(self) -> int:
        """Iterations of the linear warm-up: 1,000, or a tenth of a short schedule."""
        return min(1000, self.iterations // 10)

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up: linear in the batch size."""
        return self.lr * self.batch_size / 16


RECIPES: dict[str, DetectSettings] = {
    "1x": DetectSettings(),
    "2x": DetectSettings(iterations=180_000),
    "cpu": DetectSettings(
        iterations=300, batch_size=4, lr=0.08, short_side=(160, 192), long_side=320, width=64, rois=64, proposals=300,
        anchor=16,
    ),
}  # fmt: skip
"""Settings by name. `cpu` trains a small detector on a narrow ResNet in minutes."""


def resolve(recipe: str = "1x", **given: Any) -> DetectSettings:
    """Return a recipe with the given settings that are not None.

    >>> resolve("1x", iterations=900).milestones, resolve("1x", short_side="320").short_side
    ((600, 800), (320, 320))
    """
    if recipe not in RECIPES:
        raise UserError(f"unknown detection recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    if isinstance(text := given.get("short_side"), str):
        parts = text.split("-")
        if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
            raise UserError(f"--short-side {text!r} is neither a number of pixels nor a range such as 640-800")
        given["short_side"] = int(parts[0]), int(parts[-1])
    return replace(RECIPES[recipe], **{name: value for name, value in given.items() if value is not None})


def learning_rate(step: int, settings: DetectSettings) -> float:
    """Return the learning rate of a step (from 0): warm-up from 0.001 × peak, then peak, ÷10 and ÷100.

    >>> s = DetectSettings()
    >>> [round(learning_rate(step, s), 6) for step in (0, 500, 1000, 59_999, 60_000, 80_000)]
    [2e-05, 0.01001, 0.02, 0.02, 0.002, 0.0002]
    """
    factor = 1.0
    if step < settings.warmup:
        factor = _WARMUP_FACTOR + (1 - _WARMUP_FACTOR) * step / settings.warmup
    tenths = sum(step >= milestone for milestone in settings.milestones)
    return settings.peak_lr * factor * 0.1**tenths
