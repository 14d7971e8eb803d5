"""ResNet-50 on ImageNet, exactly as the paper's appendix sets it.

Command   snclr pretrain --recipe resnet50-imagenet --data imagenet/train --out RUN   (under torchrun on every node)
Cost      the paper trains on 32 A100 GPUs; not run by us
Expected  linear top-1 on ImageNet, from the paper: 69.6 / 72.4 / 74.5 / 75.3 % at 100 / 200 / 400 / 800 epochs
"""

from __future__ import annotations

from snclr.recipes import Recipe, paper

SETTINGS = {
    **paper.SETTINGS,
    "encoder": "resnet50",
    "stem": "standard",
    "optimizer": "lars",
    "lr": 0.3,
    "weight_decay": 1e-6,  # the paper gives none for ResNet; BYOL's 1.5e-6 and MoCo v3's 1e-6 agree in size
    "warmup_epochs": 10,
}


def recipes() -> dict[str, Recipe]:
    """The four lengths of the paper; 800 epochs is the plain name."""
    lengths = {"resnet50-imagenet": 800, **{f"resnet50-imagenet-{n}ep": n for n in (100, 200, 400)}}
    return {
        name: Recipe(name, f"ResNet-50 on ImageNet as in the paper, {n} epochs", {**SETTINGS, "epochs": n})
        for name, n in lengths.items()
    }
