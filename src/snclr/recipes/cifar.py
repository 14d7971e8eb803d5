"""Small images (about 32 × 32), such as CIFAR-10.

Command   snclr pretrain --recipe cifar --data cifar10 --out RUN
Cost      meant for one GPU; a step of 256 images takes 10 s on two CPU cores
Expected  settings by the habits of the field for CIFAR; not run whole by us
"""

from __future__ import annotations

from snclr.recipes import Recipe

SETTINGS = {
    "encoder": "resnet18",
    "stem": "small",
    "image_size": 32,
    "batch_size": 512,
    "epochs": 200,
    "optimizer": "sgd",
    "lr": 0.06,
    "weight_decay": 5e-4,
    "warmup_epochs": 10,
    "momentum": 0.99,
    "neighbors": 30,
    "queue_length": 16_384,
    "hidden": 2048,
    "dim": 256,
    "views": "cifar",
}


def recipes() -> dict[str, Recipe]:
    """One recipe."""
    return {"cifar": Recipe("cifar", "32 × 32 images such as CIFAR-10, ResNet-18, one GPU", SETTINGS)}
