"""CIFAR-10 whole on two CPU cores in under half an hour: small enough to repeat with several seeds.

Command   snclr pretrain --recipe cifar-cpu --data cifar10 --out RUN
Cost      20 to 25 minutes on two cores with other work beside it, from a folder of PNG files
Expected  top-1 on the test images, seeds 0, 1, 2: kNN 54.8, 53.9, 54.1 %; linear 55.9, 55.7, 56.5 %
"""

from __future__ import annotations

from snclr.recipes import Recipe
from snclr.recipes.demo import SETTINGS as DEMO

# The demo's narrow encoder and settings; ten times the images, so fewer passes and a longer queue.
SETTINGS = {**DEMO, "epochs": 16, "queue_length": 16_384}


def recipes() -> dict[str, Recipe]:
    """One recipe."""
    return {"cifar-cpu": Recipe("cifar-cpu", "CIFAR-10 on two CPU cores, narrow ResNet, half an hour", SETTINGS)}
