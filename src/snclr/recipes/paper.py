"""What the paper's ResNet and ViT trainings on ImageNet have in common."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    "image_size": 224,
    "batch_size": 4096,
    "momentum": 0.99,
    "neighbors": 30,
    "queue_length": 128_000,
    "hidden": 4096,
    "dim": 256,
    "temperature": 0.2,
    "views": "byol",
    "precision": "bf16",
    "workers": 8,
    "devices": "auto",
    "log_every": 50,
}
