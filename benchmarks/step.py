"""Time of a training step compared with its lower bound: the encoder passes that every such method needs.

    python benchmarks/step.py            # ResNet-18 at 32 px, batch 256, K = 30, Q = 16,384; a few minutes on two cores
    python benchmarks/step.py --json     # the same, with one JSON object as the last line

floor   two forward and backward passes of the encoder and two forward passes of its EMA copy, on preloaded tensors
step    SNCLR's step on preloaded views: encoders, heads, search, loss, gradient, optimizer, EMA, queue
Floor and step alternate, so that the load of the machine affects both alike. Then follow the parts of the step outside
the encoder, each measured alone, and the step with views from the dataloader, with the time spent waiting for them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

import torch
from torch import Tensor

from snclr.data.datasets.base import ArrayDataset, ImageDataset, open_dataset
from snclr.data.loader import ViewLoader
from snclr.methods.common.ema import ema_update
from snclr.train.build import build_method, encoder_spec, view_settings
from snclr.train.config import PretrainConfig, resolve
from snclr.train.optim import build_optimizer, scaled_lr


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Step:
    """A method with its optimizer and one preloaded batch."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        built: Any = build_method(config, encoder_spec(config))
        self.method = built.train()
        self.method.encoder.to(memory_format=torch.channels_last)
        self.method.momentum_encoder.to(memory_format=torch.channels_last)
        self.optimizer = build_optimizer(
            config.optimizer,
            self.method.named_parameters(),
            lr=scaled_lr(config.lr, config.batch_size),
            weight_decay=config.weight_decay,
        )
        shape = (config.batch_size, 3, config.image_size, config.image_size)
        generator = torch.Generator().manual_seed(0)
        self.views = tuple(
            torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last) for _ in range(2)
        )
        self.ids = torch.arange(config.batch_size)
        filler = torch.randn(config.queue_length, config.dim, generator=generator)
        self.method.queue.push(filler, torch.arange(10**6, 10**6 + config.queue_length))

    def floor(self) -> None:
        """Run the encoder passes alone, with a sum as the loss."""
        m = self.method
        with torch.no_grad():
            for view in self.views:
                m.momentum_encoder(view)
        for view in self.views:
            m.encoder(view).sum().backward()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, views: Sequence[Tensor] | None = None) -> None:
        output = self.method(views or self.views, self.ids, epoch=0)
        output.loss.backward()
        torch.nn.utils.get_total_norm([p.grad for p in self.method.parameters() if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.after_step(0, 100)

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part that the step adds to its floor, for both views."""
        m, c = self.method, self.config
        pooled = torch.randn(c.batch_size, encoder_spec(c).num_features)
        y = torch.randn(c.batch_size, c.dim)
        z = torch.randn(c.batch_size, c.dim, requires_grad=True)

        def heads() -> None:
            for _ in range(2):
                with torch.no_grad():
                    m.momentum_projector(pooled)
                m.predictor(m.projector(pooled)).sum().backward()

        def loss() -> None:
            for _ in range(2):
                m.criterion(y, z, y, self.ids).loss.backward()

        for p in m.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
        seconds = {
            "optimizer": median(self.optimizer.step),
            "heads": median(heads),
            "search and loss": median(loss),
            "momentum": median(lambda: ema_update(m.encoder, m.momentum_encoder, 0.99)),
            "queue": median(lambda: m.queue.push(y, self.ids)),
        }
        self.optimizer.zero_grad(set_to_none=True)
        return seconds


def median(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    return statistics.median(timed(run) for _ in range(repeats))


def fed_by_loader(step: Step, dataset: ImageDataset, workers: int, steps: int) -> dict[str, float]:
    """Return the seconds per step with views from the dataloader, and how many of them are spent waiting."""
    c = step.config
    loader = ViewLoader(
        dataset, views=view_settings(c), image_size=c.image_size, batch_size=c.batch_size, seed=0, workers=workers
    )
    batches = loader.batches(0, steps + 1)
    step.step(next(batches).views)  # starts the workers, which is not part of a step
    waited = total = 0.0
    for _ in range(steps):
        start = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - start
        step.step(batch.views)
        total += time.perf_counter() - start
    list(batches)
    return {"seconds": total / steps, "waiting": waited / steps}


def write_png(dataset: ArrayDataset, folder: Path) -> None:
    from PIL import Image

    for i, image in enumerate(dataset.images):
        Image.fromarray(image).save(folder / f"{i:05d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--neighbors", type=int, default=30)
    parser.add_argument("--queue-length", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    config = resolve(
        {
            "recipe": "cifar", "encoder": a.encoder, "image_size": a.image_size, "batch_size": a.batch_size,
            "neighbors": a.neighbors, "queue_length": a.queue_length,
        }
    )  # fmt: skip
    step = Step(config)
    step.floor()
    step.step()
    pairs = [(timed(step.floor), timed(step.step)) for _ in range(a.rounds)]
    floor, whole = statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
    ratio = statistics.median(p[1] / p[0] for p in pairs)
    print(f"{a.encoder} at {a.image_size} px, batch {a.batch_size}, K={a.neighbors}, Q={a.queue_length},", end=" ")
    print(f"{torch.get_num_threads()} threads, median of {a.rounds}\n")
    print(f"floor (encoder passes)        {floor:8.3f} s")
    print(f"step on preloaded views       {whole:8.3f} s   {ratio:.3f} × the floor")
    parts = step.parts()
    for name, seconds in parts.items():
        print(f"  {name:28}{seconds:8.3f} s   {seconds / whole:.1%}")
    demo = open_dataset("demo")
    assert isinstance(demo, ArrayDataset)
    fed = {"memory, no workers": fed_by_loader(step, demo, 0, a.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        write_png(demo, Path(folder))
        fed["PNG files, 2 workers"] = fed_by_loader(step, open_dataset(Path(folder)), 2, a.rounds)
    print("\nwith dataloader and augmentation")
    for name, one in fed.items():
        share = one["waiting"] / one["seconds"]
        print(f"  {name:22}{one['seconds']:14.3f} s   {share:.1%} waiting for views")
    if a.json:
        print(
            json.dumps(
                {
                    "floor_s": floor, "step_s": whole, "step_over_floor": ratio, "parts_s": parts,
                    "with_loader": fed, "threads": torch.get_num_threads(), **vars(a),
                }
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
