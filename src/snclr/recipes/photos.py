"""A few thousand of your own photos, on one GPU or a CPU.

Command   snclr pretrain --data my-photos/ --out RUN
Cost      `snclr plan --data my-photos/` says what it takes on your machine
Expected  settings by the habits of the field for small sets; not tuned by us
"""

from __future__ import annotations

from snclr.recipes import Recipe

SETTINGS = {
    "encoder": "resnet18",
    "image_size": 128,
    "batch_size": 128,
    "epochs": 100,
    "optimizer": "sgd",
    "lr": 0.06,
    "weight_decay": 5e-4,
    "warmup_epochs": 5,
    "momentum": 0.99,
    "neighbors": 10,
    "queue_length": 4096,
    "hidden": 1024,
    "dim": 128,
    "views": "byol",
    "crop_min": 0.2,
    "workers": 2,
}


def recipes() -> dict[str, Recipe]:
    """One recipe, the default of `snclr pretrain`."""
    return {"photos": Recipe("photos", "a few thousand of your own photos, one GPU or a CPU (the default)", SETTINGS)}
