"""ImageNet: ResNet-50, 100 to 800 epochs; ViT-S/16 and ViT-B/16, 100 to 300.

The settings are those of the paper's appendix. It does not give m, the epochs without neighbors; here m = 0.

Command   snclr pretrain --recipe resnet50-imagenet --data imagenet/train --out RUN   (under torchrun on every node)
Cost      the paper trains on 32 A100 GPUs; not run by us
Memory    of tensors per GPU with 512 images (8 GPUs), counted by `snclr plan`; a GPU needs 1 to 3 GB more:
          ResNet-50 24.3 GB, ViT-S 19.1 GB, ViT-B 38.1 GB;
          with --activation-checkpointing ResNet-50 10.6 GB, ViT-S 5.3 GB, ViT-B 10.6 GB
Expected  linear top-1 on ImageNet, from the paper:
          ResNet-50 69.6 / 72.4 / 74.5 / 75.3 % at 100 / 200 / 400 / 800 epochs,
          ViT-S 68.5 / 72.5 / 73.4 %, ViT-B 71.4 / 74.3 / 76.8 % at 100 / 200 / 300 epochs
"""

_SHARED = {
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

RESNET50 = {
    **_SHARED,
    "encoder": "resnet50",
    "stem": "standard",
    "optimizer": "lars",
    "lr": 0.3,
    "weight_decay": 1e-6,  # the paper gives none for ResNet; this is the released code's and MoCo v3's
    "warmup_epochs": 10,
}

VIT = {
    **_SHARED,
    "heads": 12,  # as in the authors' released ViT-S; timm's and DeiT's has 6
    "sincos": True,  # this and the frozen patch embedding are MoCo v3's, which the paper's ViT settings follow
    "freeze_patch_embed": True,
    "optimizer": "adamw",
    "lr": 1.5e-4,
    "weight_decay": 0.1,
    "warmup_epochs": 40,
}
