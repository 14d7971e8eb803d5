"""Run on several ranks: the training steps of some cases; rank 0 writes ids, views, losses, gradients and state.

usage: step_worker.py OUT PRECISION:STEPS:OPTIMIZER:ENCODER:BATCH:IMAGE_SIZE …
"""

import hashlib
import os
import sys
from itertools import chain
from pathlib import Path

import torch

from snclr.distributed.collectives import all_gather, all_gather_objects, all_reduce_sum
from snclr.train.build import build_task
from snclr.train.config import resolve
from snclr.train.pretrain import launch_run

SETTINGS = {
    "recipe": "demo", "data": "demo", "out": "unused", "epochs": 1, "workers": 0, "warmup_epochs": 0,
    "queue_length": 40, "neighbors": 4, "hidden": 64, "dim": 32, "temperature": 0.2, "max_bad_share": 0.0,
}  # fmt: skip
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.001, "lars": 0.3}


def run_steps(precision: str, steps: int, optimizer: str, encoder: str, batch_size: int, image_size: int) -> dict:
    """Return image ids, hashes of the views, losses, the first gradients and the final state, over all ranks."""
    stem = "half" if "resnet" in encoder else "auto"
    sizes = {"encoder": encoder, "stem": stem, "batch_size": batch_size, "image_size": image_size}
    config = resolve(
        {**SETTINGS, **sizes, "precision": precision, "optimizer": optimizer, "lr": LEARNING_RATES[optimizer]}
    )
    fabric = launch_run(config)
    torch.set_num_threads(1)
    task = build_task(config, fabric)
    ids, views, losses, gradients = [], [], [], []
    inner = task.optimizer.step

    def step_and_record(*args, **kwargs):
        if len(gradients) < 3:
            named = task.module.named_parameters()
            gradients.append({name: part.grad.clone() for name, part in named if part.grad is not None})
        return inner(*args, **kwargs)

    task.optimizer.step = step_and_record
    for batch in task.loader.batches(0, steps):
        output, _, _ = task.training_step(batch)
        losses.append(float(all_reduce_sum(output.loss.double()) / fabric.world_size))
        ids.append(all_gather(batch.ids))
        rows = [[hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest() for row in v] for v in batch.views]
        views.append([[*chain.from_iterable(parts)] for parts in zip(*all_gather_objects(rows), strict=True)])
    return {
        "ids": torch.stack(ids), "views": views, "losses": losses, "gradients": gradients,
        "state": task.module.state_dict(),
    }  # fmt: skip


if __name__ == "__main__":
    out, *cases = sys.argv[1:]
    results = {}
    for case in cases:
        precision, steps, optimizer, encoder, batch_size, image_size = case.split(":")
        results[case] = run_steps(precision, int(steps), optimizer, encoder, int(batch_size), int(image_size))
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, Path(out))
