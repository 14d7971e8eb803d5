"""`snclr plan`: what a run would take on this machine, before it is started; a few steps of it are tried."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from snclr.config import PretrainConfig
from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.comparison.study import Data

EXAMPLES = """examples:
  snclr plan --data my-photos/
  snclr plan --data my-photos/ --encoder resnet50 --image-size 224 --batch-size 256
  snclr plan --recipe cifar --data cifar10 --json

It takes the flags of `snclr pretrain`, makes the run's encoder, heads and queue, fills the queue, and trains a few
steps on your images. Nothing is written. With --devices or --nodes it tries one process with its share of the batch.
"""


def plan(*, steps: int = 10, **settings: Any) -> dict[str, Any]:
    """Try `steps` steps of a run with these settings (those of `snclr.pretrain`), and say what all of it would take."""
    from snclr.comparison.cost import measure_cost
    from snclr.comparison.study import look_at_data
    from snclr.config import resolve
    from snclr.data.order import steps_per_epoch
    from snclr.train.launch import check_batch

    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    config = resolve({**settings, "out": "unused"})
    data, processes = look_at_data(config.data), _processes(config)
    every = steps_per_epoch(data.images, config.batch_size)
    check_batch(config.batch_size, processes)
    share = {"batch_size": config.batch_size // processes, "devices": "1", "nodes": 1}
    tried = measure_cost({**settings, **share}, steps=steps)
    seconds = tried["cost"]["seconds_with_views"]
    return {
        "images": data.images, "batch_size": config.batch_size, "processes": processes, "epochs": config.epochs,
        "steps_per_epoch": every, "steps": every * config.epochs, "tried_steps": steps,
        "compute_seconds_per_step": tried["numbers"]["seconds_per_step"], "seconds_per_step": seconds,
        "images_per_second": config.batch_size / seconds, "total_seconds": seconds * every * config.epochs,
        "peak_mb": tried["cost"]["peak_mb"], "memory": tried["cost"]["memory"],
        "checkpoint_mb": tried["cost"]["state_mb"], "keep_checkpoints": config.keep_checkpoints,
        "queue": _queue(config, data, tried["cost"]["queue_mb"]),
    }  # fmt: skip


def _processes(config: PretrainConfig) -> int:
    import torch

    here = max(1, torch.cuda.device_count()) if config.devices == "auto" else int(config.devices)
    return here * config.nodes


def _queue(config: PretrainConfig, data: Data, megabytes: float) -> dict[str, Any] | None:
    """How full of an image's own class the queue is, and how old its features get; None for a method without one."""
    from snclr.methods import METHODS

    used = METHODS[config.method].settings
    if "queue_length" not in used:
        return None
    pushed = data.images * (2 if "push" in used and config.push == "both" else 1)
    found: dict[str, Any] = {
        "length": config.queue_length, "mb": megabytes, "epochs_of_life": config.queue_length / pushed,
        "share_of_images": min(1.0, config.queue_length / pushed),
    }  # fmt: skip
    if "neighbors" in used:
        found["neighbors"] = config.neighbors
    if data.same_class is not None:
        found["same_class"] = data.same_class * config.queue_length
    return found


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags of pretrain that decide what a run costs, and --steps."""
    from snclr.commands.pretrain import add_settings

    parser.epilog = EXAMPLES
    parser.usage = "snclr plan --data DATA [--recipe NAME] [options]"
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps to try")
    add_settings(parser, leave_out=("out", "resume", "overwrite", "init_from"))
    parser.add_argument("--json", action="store_true", default=False, help="print the plan as one JSON object")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print."""
    from snclr.commands.pretrain import given_settings

    found = plan(steps=arguments.steps, **given_settings(arguments))
    print(json.dumps(found) if arguments.json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The plan in words, one fact a line; what is measured and what is calculated from it is said."""
    from snclr.progress import duration

    processes = found["processes"]
    part = "" if processes == 1 else f" (one of {processes} processes, with {found['batch_size'] // processes} of them)"
    waiting = max(0.0, 1 - found["compute_seconds_per_step"] / found["seconds_per_step"])
    lines = [
        ("images", f"{found['images']:,} in batches of {found['batch_size']:,}: {found['steps_per_epoch']:,} steps an"
         f" epoch, {found['steps']:,} in {found['epochs']} epochs"),
        ("a step", f"{found['seconds_per_step']:.3g} s{part}, {waiting:.0%} of it waiting for views"
         f" (measured: {found['tried_steps']} steps with a full queue)"),
        ("the run", f"{duration(found['total_seconds'])} at {found['images_per_second']:,.0f} images/s (calculated)"),
        ("memory", f"{_size(found['peak_mb'])} at most, "
         + ("torch's tensors on the GPU" if found["memory"] == "cuda" else "this process, without the loader's")
         + " (measured)"),
        ("disk", f"{_size(found['checkpoint_mb'])} a checkpoint, {found['keep_checkpoints']} of them kept"),
    ]  # fmt: skip
    if (queue := found["queue"]) is not None:
        life = f"an entry lives {queue['epochs_of_life']:.2g} epochs"
        lines.append(("queue", f"{queue['length']:,} features, {_size(queue['mb'])}; {life}, and"
                      f" {queue['share_of_images']:.0%} of the images are in it"))  # fmt: skip
        if "same_class" in queue:
            lines.append(("", f"about {queue['same_class']:,.0f} of them are of an image's own class (by the labels)"))
    if processes > 1:
        lines.append(("note", "messages between processes are not in these seconds; docs/scaling.md calculates them"))
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:{width}}  {text}" for name, text in lines), *_warnings(found)])


def _warnings(found: dict[str, Any]) -> list[str]:
    queue, lines = found["queue"] or {}, []
    if queue.get("epochs_of_life", 0) > 2:
        lines.append(
            f"The queue holds every image {queue['epochs_of_life']:.1f} times over, most of them old: --queue-length"
            f" {found['images']} or less is enough."
        )
    wanted = queue.get("neighbors", 0)
    if 0 < queue.get("same_class", wanted) < wanted:
        lines.append(
            f"Of K = {wanted} neighbours at most about {queue['same_class']:.0f} can be of the image's own class: lower"
            " --neighbors, or give a longer --queue-length."
        )
    return [f"\n{line}" for line in lines]


def _size(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes:.3g} MB"
