"""Run on several ranks: a few steps of every method; rank 0 writes losses, gradients and the final state to a file."""

import sys

import torch
import torch.distributed as dist

from snclr.distributed.collectives import all_reduce_sum, is_distributed, rank_and_size
from snclr.distributed.gradients import GradientAverager
from snclr.distributed.sync_batch_norm import synchronize_batch_norm
from snclr.methods import METHODS
from snclr.train.build import apply_memory_settings, build_method, encoder_spec, view_sizes
from snclr.train.config import resolve, settings_for_method

SETTINGS = {
    "recipe": "demo", "image_size": 16, "hidden": 24, "dim": 8, "neighbors": 3, "queue_length": 20, "prototypes": 6,
    "queue_dtype": "float32", "momentum": 0.99,
}  # fmt: skip
BATCH, STEPS = 8, 3


# Every method with its defaults, and options that communicate or need gradients of unused parameters.
CASES = {
    "options": {"method": "snclr", "gamma": "pull", "negatives": "both-views", "predictor_layers": 0},
    "search": {
        "method": "snclr", "search_view": "plain", "search_space": "encoder", "unique_neighbors": True,
    },
    "agreeing": {"method": "snclr", "agreeing_neighbors": True},
    "gate": {"method": "snclr", "min_agreement": 0.2},
    "symmetric": {"method": "mocov2", "symmetric": True},
    "drawn negatives": {"method": "pirl", "bank_negatives": 9},
    "assignment queue": {
        "method": "swav", "batch_size": 8, "assignment_queue": 8, "assignment_queue_start": 0, "local_crops": 2,
    },
    "local crops": {"method": "dino", "local_crops": 2, "norm_last_layer": False},
    "micro batch": {"method": "snclr", "encoder": "test_vit", "stem": "auto", "micro_batch": 3},
    "checkpointing": {"method": "byol", "activation_checkpointing": True},
    "other negatives": {"method": "snclr", "sides": "other-negatives", "negatives": "both-views"},
    **{name: {"method": name} for name, config in METHODS.items() if not config.masks_patches},
    **{
        name: {"method": name, "encoder": "vit_tiny", "stem": "auto", "decoder_layers": 1}
        for name, config in METHODS.items()
        if config.masks_patches
    },
    "learned attention": {"method": "snclr", "attention": "linear", "attention_gradient": True},
    "learned attention, unused": {
        "method": "snclr", "attention": "linear", "attention_gradient": True, "sides": "negatives",
    },
}  # fmt: skip


def run_steps(name: str) -> dict:
    """Run three steps of gradient descent in double precision, with the same global batches for any world size."""
    config = resolve(settings_for_method(CASES[name]["method"], {**SETTINGS, **CASES[name]}))
    method = build_method(config, encoder_spec(config), classes=3, images=17).double()
    apply_memory_settings(method, config)
    method = synchronize_batch_norm(method)
    rank, size = rank_and_size()
    averager = GradientAverager(method) if is_distributed() else None
    own_rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    losses, gradients = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        views = [
            torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64) for size in view_sizes(config)
        ]
        ids, labels = torch.arange(BATCH) + step * BATCH // 2, (torch.arange(BATCH) % 4) - 1  # two images have no label
        output = method([view[own_rows] for view in views], ids[own_rows], epoch=step, labels=labels[own_rows])
        output.loss.backward()
        if averager is not None:
            averager.finish()
        losses.append(float(all_reduce_sum(output.loss.detach().clone()) / size))
        trained = {key: part for key, part in method.named_parameters() if part.requires_grad}
        gradients.append({key: part.grad.clone() for key, part in trained.items()})
        with torch.no_grad():
            for part in trained.values():
                part -= 0.05 * part.grad
                part.grad = None
        method.after_step(step, STEPS)
    state = {key: value.clone() for key, value in method.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    found = {name: run_steps(name) for name in CASES}
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
