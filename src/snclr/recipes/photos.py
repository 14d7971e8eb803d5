"""A few thousand of your own photos, on one GPU or a CPU. The default of `snclr pretrain`.

Command   snclr pretrain --data my-photos/ --out RUN
Cost      `snclr plan --data my-photos/` measures it on your machine
Expected  common settings for small datasets; not tuned by us
"""

SETTINGS = {
    "encoder": "resnet18",
    "image_size": 128,
    "batch_size": 128,
    "epochs": 100,
    "optimizer": "sgd",
    "lr": 0.06,
    "weight_decay": 5e-4,
    "warmup_epochs": 5,
    "momentum": "auto",
    "neighbors": 10,
    "queue_length": 4096,
    "hidden": 1024,
    "dim": 128,
    "prototypes": 512,
    "views": "byol",
    "crop_min": 0.2,
    "workers": 2,
}
