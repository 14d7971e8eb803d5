"""The plan of a run: its size, its cost by a few training steps, and its neighbors after a short training.

torch is imported only after the settings and the images are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snclr.data.info import DatasetInfo, inspect_dataset
from snclr.data.read_check import check_images, unread_photos
from snclr.data.sampler import steps_per_epoch
from snclr.errors import UserError, count
from snclr.methods.config import METHODS
from snclr.train.config import PretrainConfig, fit_queue, resolve

USELESS_PURITY = 0.45
"""At this neighbor purity and below, neighbors gained nothing on any dataset of docs/results/neighbor-study.md."""
PROBE_STEPS = 50
"""After fewer steps a probe gives no advice about neighbors, unless they are the whole run."""
MEASURE_SECONDS = 60.0
"""`plan` measures fewer steps if they take longer: ten steps of a large encoder can take minutes on a CPU."""


@dataclass(frozen=True)
class QueuePlan:
    """The queue of a planned run."""

    length: int
    mb: float
    """Memory of its features, image ids and ages in megabytes, as in `tensor_mb`."""
    epochs_of_life: float
    """Epochs that a feature stays in the queue."""
    share_of_images: float
    """Share of the images that have a feature in the queue."""
    neighbors: int | None = None
    """K, for methods that use neighbors."""
    same_class: float | None = None
    """Expected number of different images of an image's own class in the queue, if the images have labels."""


@dataclass(frozen=True)
class NeighborProbe:
    """The neighbors after a short training."""

    minutes: float
    steps: int
    agreement: float | None
    """Share of the neighbors of one view whose image the other view also finds; None with one search per image."""
    purity: float | None
    """Share of the neighbors with the image's class, if the images have labels."""
    pulled_share: float | None
    """Share of the neighbors that the loss pulls the image toward; None if neighbors are not positives."""
    advice: str


@dataclass(frozen=True)
class RunPlan:
    """The size and cost of a planned run. Seconds per step and `peak_mb` are measured, the rest is calculated."""

    images: int
    batch_size: int
    ranks: int
    """World size: ranks over all nodes."""
    epochs: int
    steps_per_epoch: int
    steps: int
    tried_steps: int
    """Training steps that were measured."""
    compute_seconds_per_step: float
    """Without the time spent waiting for views."""
    seconds_per_step: float
    images_per_second: float
    total_seconds: float
    peak_mb: float
    memory: str
    """What `peak_mb` counts: "cuda" (tensors on the GPU) or "process" (the training process without data workers)."""
    tensor_mb: dict[str, float]
    """Tensors of a rank at the peak of a step, counted by part: weights, target, queue, gradients, optimizer,
    activations (with the views), and total."""
    checkpoint_mb: float
    keep_checkpoints: int
    queue: QueuePlan | None
    """None for methods without a queue."""
    probe: NeighborProbe | None = None
    """None without a probe."""
    checked: int = 0
    """Images that were decoded to find unreadable ones: all of a small dataset, else a sample."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Unreadable images among these, with the reasons."""
    unread_photos: str = ""
    """Photographs of formats that are not read, e.g. HEIC."""

    @property
    def warnings(self) -> list[str]:
        """What to change before the run: advice of the probe, and about a queue that does not suit the images."""
        found = [] if self.probe is None else [self.probe.advice]
        queue = self.queue
        if queue is not None and queue.length > self.images:
            found.append(
                f"The queue is longer than the number of images: it holds up to {queue.length / self.images:.1f}"
                f" features of each, mostly outdated. --queue-length {self.images} or less is enough."
            )
        wanted, available = (None, None) if queue is None else (queue.neighbors, queue.same_class)
        if wanted is not None and available is not None and available < wanted:
            found.append(
                f"At most about {available:.0f} of K = {wanted} neighbors can share the image's class. Lower"
                " --neighbors or raise --queue-length."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        queue = self.queue and {name: value for name, value in asdict(self.queue).items() if value is not None}
        return {**asdict(self), "queue": queue}


def plan_run(
    settings: Mapping[str, Any], config: str | Path | None, *, steps: int, probe_minutes: float | None, quiet: bool
) -> RunPlan:
    """Measure some steps of a run and, for SNCLR, its neighbors after a short training; write nothing."""
    run = resolve({**settings, "out": "unused"}, config)
    if probe_minutes and run.method != "snclr":
        raise UserError(f"--probe-minutes is for --method snclr, not {run.method}; omit it")
    if probe_minutes is None:
        probe_minutes = 1.0 if run.method == "snclr" else 0.0
    data = inspect_dataset(run.data)
    run = fit_queue(run, data.images)
    epoch_steps = steps_per_epoch(data.images, run.batch_size)
    readable = check_images(run.data, min_side=run.image_size, quiet=quiet)
    from snclr.distributed.launch import check_batch_size  # imports torch, so after the checks above
    from snclr.train.planning.cost import measure_cost
    from snclr.train.planning.memory import count_memory

    ranks = _world_size(run)
    check_batch_size(run.batch_size, ranks)
    share = {"batch_size": run.batch_size // ranks, "devices": "1", "nodes": 1}
    cost = measure_cost({**run.to_dict(), **share}, steps=steps, seconds=MEASURE_SECONDS, quiet=quiet)
    seconds = cost["seconds_with_views"]
    memory = count_memory(
        run, images=run.batch_size // ranks, ranks=ranks, classes=data.classes, dataset_images=data.images
    )
    tensor_mb = {name: count / 1e6 for name, count in {**asdict(memory), "total": memory.total}.items()}
    probe = _probe({**run.to_dict(), **share}, probe_minutes, quiet) if probe_minutes else None
    return RunPlan(
        images=data.images, batch_size=run.batch_size, ranks=ranks, epochs=run.epochs,
        steps_per_epoch=epoch_steps, steps=epoch_steps * run.epochs, tried_steps=cost["steps"],
        compute_seconds_per_step=cost["seconds_per_step"], seconds_per_step=seconds,
        images_per_second=run.batch_size / seconds, total_seconds=seconds * epoch_steps * run.epochs,
        peak_mb=cost["peak_mb"], memory=cost["memory"], tensor_mb=tensor_mb, checkpoint_mb=cost["state_mb"],
        keep_checkpoints=run.keep_checkpoints, queue=_plan_queue(run, data, tensor_mb["queue"]), probe=probe,
        checked=readable.checked, unreadable=readable.unreadable, unread_photos=unread_photos(run.data),
    )  # fmt: skip


def _probe(settings: dict[str, Any], minutes: float, quiet: bool) -> NeighborProbe:
    from snclr.train.planning.cost import probe_neighbors

    found = probe_neighbors(settings, minutes=minutes, quiet=quiet)
    agreement, purity, pulled = (found.get(name) for name in ("neighbor_agreement", "neighbor_purity", "pulled_share"))
    steps = int(found["steps"])
    if steps < PROBE_STEPS and not found["complete"]:
        advice = (
            f"The neighbors after {count(steps, 'step')} are those of an almost untrained encoder. Raise"
            " --probe-minutes to judge them."
        )
    else:
        advice = neighbor_advice(purity, pulled)
    return NeighborProbe(minutes, steps, agreement, purity, pulled, advice)


def neighbor_advice(purity: float | None, pulled: float | None) -> str:
    """Return a sentence about neighbors of this purity (None: unknown) and pulled share (None: not positives)."""
    if purity is None:
        advice = "Without labels the purity of the neighbors is not known; compare the run with --sides neither."
    elif purity > USELESS_PURITY:
        advice = (
            f"{purity:.0%} of the neighbors have the image's class: soft neighbors may help. Compare the run with"
            " --sides neither, both with --temperature 0.2 and 0.4."
        )
    else:
        advice = (
            f"{purity:.0%} of the neighbors have the image's class: soft neighbors are not likely to help. Try"
            " --search-view plain or milder --views, or use --method simclr."
        )
    if pulled is not None and pulled < 0.5:
        advice += f" Only {pulled:.0%} of them are pulled: use --gamma pull."
    return advice


def _world_size(config: PretrainConfig) -> int:
    import torch

    per_node = max(1, torch.cuda.device_count()) if config.devices == "auto" else int(config.devices)
    return per_node * config.nodes


def _plan_queue(config: PretrainConfig, data: DatasetInfo, megabytes: float) -> QueuePlan | None:
    used = METHODS[config.method].setting_names()
    if "queue_length" not in used:
        return None
    both_views = config.push == "both" if "push" in used else "symmetric" in used and config.symmetric
    pushed_per_epoch = data.images * (2 if both_views else 1)
    epochs = config.queue_length / pushed_per_epoch
    share = min(1.0, epochs)
    return QueuePlan(
        config.queue_length, megabytes, epochs, share, config.neighbors if "neighbors" in used else None,
        None if data.same_class is None else data.same_class * data.images * share,
    )  # fmt: skip
