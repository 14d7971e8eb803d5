"""ViT-S/16 and ViT-B/16 on ImageNet, exactly as the paper's appendix sets them.

Command   snclr pretrain --recipe vit-small-imagenet --data imagenet/train --out RUN   (under torchrun on every node)
Cost      the paper trains on 32 A100 GPUs; not run by us
Expected  linear top-1 on ImageNet, from the paper: at 100 / 200 / 300 epochs,
          ViT-S 68.5 / 72.5 / 73.4 %, ViT-B 71.4 / 74.3 / 76.8 %

The authors' released ViT-S has 12 attention heads (timm's and DeiT's has 6); sine-cosine positions and a frozen patch
embedding are MoCo v3's, which the paper's ViT settings follow.
"""

from __future__ import annotations

from snclr.recipes import Recipe, paper

SETTINGS = {
    **paper.SETTINGS,
    "sincos": True,
    "freeze_patch_embed": True,
    "heads": 12,
    "optimizer": "adamw",
    "lr": 1.5e-4,
    "weight_decay": 0.1,
    "warmup_epochs": 40,
}


def recipes() -> dict[str, Recipe]:
    """Both encoders at the three lengths of the paper; 300 epochs is the plain name."""
    made = {}
    for size, encoder in (("small", "vit_small"), ("base", "vit_base")):
        for suffix, n in (("", 300), ("-100ep", 100), ("-200ep", 200)):
            name = f"vit-{size}-imagenet{suffix}"
            summary = f"ViT-{size[0].upper()}/16 on ImageNet as in the paper, {n} epochs"
            made[name] = Recipe(name, summary, {**SETTINGS, "encoder": encoder, "epochs": n})
    return made
