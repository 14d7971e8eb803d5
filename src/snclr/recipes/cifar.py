"""Small images (about 32 × 32 pixels), such as CIFAR-10.

Command   snclr pretrain --recipe cifar --data cifar10 --out RUN
Cost      intended for one GPU; a step of 256 images takes 10 s on two CPU cores
Expected  common settings for CIFAR; not run to the end by us
"""

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
    "momentum": "auto",
    "neighbors": 30,
    "queue_length": 16_384,
    "hidden": 2048,
    "dim": 256,
    "prototypes": 512,
    "views": "cifar",
}
