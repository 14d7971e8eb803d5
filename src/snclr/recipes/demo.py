"""The images that come with the package, on two CPU cores in a few minutes.

Command   snclr demo            (or: snclr pretrain --recipe demo --data demo --out RUN)
"""

from __future__ import annotations

from snclr.recipes import Recipe

SETTINGS = {
    "encoder": "resnet10-narrow",
    "stem": "half",
    "image_size": 32,
    "batch_size": 256,
    "epochs": 40,
    "optimizer": "sgd",
    "lr": 0.06,
    "weight_decay": 5e-4,
    "warmup_epochs": 2,
    "momentum": 0.99,
    "neighbors": 10,
    "queue_length": 4096,
    "hidden": 512,
    "dim": 128,
    "views": "cifar",
    "workers": 0,
    "log_every": 5,
}


def recipes() -> dict[str, Recipe]:
    """One recipe."""
    return {"demo": Recipe("demo", "the images that come with the package, two CPU cores, a few minutes", SETTINGS)}
