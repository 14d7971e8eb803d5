"""The plan of a run: its size, its cost by a few training steps, and its neighbors after a short training.

torch is imported only after the settings and the images are checked.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snclr.data.info import DatasetInfo, inspect_dataset
from snclr.data.read_check import check_images, unread_photos
from snclr.data.sampler import steps_per_epoch
from snclr.errors import UserError, count
from snclr.methods.config import QueueConfig
from snclr.runtime.progress import set_status, set_torch_status
from snclr.train.config import PretrainConfig, fit_queue, resolve

HELPFUL_AGREEMENT = 0.5
"""From this agreement on, neighbors gained on the datasets of docs/results/neighbor-study.md."""
USELESS_PURITY = 0.45
"""At this neighbor purity and below, no dataset of docs/results/neighbor-study.md had a clear gain."""
PROBE_STEPS = 50
"""After fewer steps a probe gives no advice about neighbors, unless they are the whole run."""
IDLE_CORES = 0.7
"""A step on the CPU computes on at least one core, unless other processes use the cores."""
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
    """Share of the ten nearest neighbors (of K without a gate, if K is less) of one view whose image the other view
    also finds; None with one search."""
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
    stem_advice: str = ""
    """A faster stem, if the default stem of a ResNet is a slow one."""
    busy_advice: str = ""
    """That the time does not hold for an idle machine, if other processes used the cores."""

    @property
    def warnings(self) -> list[str]:
        """What to change before the run: the probe, the stem, and a queue that does not suit the images."""
        found = [advice for advice in (self.probe and self.probe.advice, self.stem_advice, self.busy_advice) if advice]
        queue = self.queue
        if queue is not None and queue.length > self.images:
            found.append(
                f"The queue is longer than the number of images: it holds up to {queue.length / self.images:.1f}"
                f" features of each, mostly outdated. --queue-length {self.images} or less is enough."
            )
        if queue is not None and queue.same_class is not None and queue.same_class < (queue.neighbors or 0):
            found.append(
                f"At most about {queue.same_class:.0f} of K = {queue.neighbors} neighbors can share the image's"
                " class. Lower --neighbors or raise --queue-length."
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
    checked, unreadable = check_images(run.data, min_side=run.image_size, quiet=quiet)
    set_torch_status()
    from snclr.distributed.environment import ranks_per_node  # imports torch, so after the checks above
    from snclr.distributed.launch import check_batch_size
    from snclr.runtime.device import pick_device
    from snclr.train.planning.cost import measure_cost
    from snclr.train.planning.memory import count_memory

    device = pick_device(run.device).partition(":")[0]
    ranks = ranks_per_node(device, run.devices) * run.nodes
    check_batch_size(run.batch_size, ranks)
    rank_images = max(run.batch_size // ranks, 2)  # a batch norm that is alone needs two
    share = {"batch_size": rank_images, "devices": "1", "nodes": 1}
    cost = measure_cost({**run.to_dict(), **share}, steps=steps, seconds=MEASURE_SECONDS, quiet=quiet)
    seconds = cost["seconds_with_views"]
    set_status("counting the tensors of a step")
    memory = count_memory(run, images=rank_images, ranks=ranks, classes=data.classes, dataset_images=data.images)
    tensor_mb = {name: size / 1e6 for name, size in memory.items()}
    probe = _probe({**run.to_dict(), **share}, probe_minutes, quiet) if probe_minutes else None
    return RunPlan(
        images=data.images, batch_size=run.batch_size, ranks=ranks, epochs=run.epochs,
        steps_per_epoch=epoch_steps, steps=epoch_steps * run.epochs, tried_steps=cost["steps"],
        compute_seconds_per_step=cost["seconds_per_step"], seconds_per_step=seconds,
        images_per_second=run.batch_size / seconds, total_seconds=seconds * epoch_steps * run.epochs,
        peak_mb=cost["peak_mb"], memory=cost["memory"], tensor_mb=tensor_mb, checkpoint_mb=cost["state_mb"],
        keep_checkpoints=run.keep_checkpoints, queue=_plan_queue(run, data, tensor_mb["queue"]), probe=probe,
        checked=checked, unreadable=unreadable, unread_photos=unread_photos(run.data), stem_advice=_stem_advice(run),
        busy_advice=busy_advice(cost["cpu_seconds_per_step"] / cost["seconds_per_step"]) if device == "cpu" else "",
    )  # fmt: skip


def _probe(settings: dict[str, Any], minutes: float, quiet: bool) -> NeighborProbe:
    from snclr.train.planning.cost import probe_neighbors

    found = probe_neighbors(settings, minutes=minutes, quiet=quiet)
    agreement, purity, pulled = (found.get(name) for name in ("neighbor_agreement", "neighbor_purity", "pulled_share"))
    steps = int(found["steps"])
    if steps < PROBE_STEPS and not found["complete"]:
        enough = math.ceil(minutes * PROBE_STEPS / max(steps, 1))
        advice = (
            f"The neighbors after {count(steps, 'step')} are those of an almost untrained encoder. To judge them, take"
            f" about {PROBE_STEPS} steps: --probe-minutes {enough}"
        )
    else:
        advice = neighbor_advice(agreement, purity, pulled)
    return NeighborProbe(minutes, steps, agreement, purity, pulled, advice)


def neighbor_advice(agreement: float | None, purity: float | None, pulled: float | None) -> str:
    """Return a sentence about neighbors of this agreement (None: one search), purity (None: no labels) and pulled share
    (None: not positives).
    """
    if agreement is None:
        advice = "With one search per image, agreement is unknown; compare the run with --sides neither."
    elif agreement < HELPFUL_AGREEMENT or (purity is not None and purity <= USELESS_PURITY):
        found = f"{agreement:.0%} agree" if agreement < HELPFUL_AGREEMENT else f"{purity:.0%} have the image's class"
        advice = (
            f"Of the neighbors, {found} so far: soft neighbors are not likely to help yet. --min-agreement"
            f" {HELPFUL_AGREEMENT} keeps them out of the loss until they agree; milder --views raise the agreement."
        )
    else:
        advice = (
            f"Of the neighbors, {agreement:.0%} agree: soft neighbors are likely to help. --neighbors 10 --gamma max"
            " --attention-temperature 0.1 gained in our study; compare with --sides neither."
        )
    if pulled is not None and pulled < 0.5:
        advice += f" Only {pulled:.0%} of them are pulled: use --gamma pull."
    return advice


def _stem_advice(run: PretrainConfig) -> str:
    """Advise on the default stem from 33 to 64 pixels: it can be slower than the standard one on larger images."""
    from snclr.train.build import encoder_spec

    if run.stem != "auto" or run.image_size <= 32 or encoder_spec(run).stem != "small":
        return ""
    return (
        f"At {run.image_size} pixels the default stem is small, which computes about 15 times as much as standard."
        " If the run is too long, give --stem half or --stem standard."
    )


def busy_advice(cores: float) -> str:
    """Return a sentence if a step on the CPU had fewer than `IDLE_CORES` cores on average, else ""."""
    if cores >= IDLE_CORES:
        return ""
    return (
        f"The training had {cores:.0%} of one core: other processes use the cores. The time holds as long as they do;"
        " on an idle machine the run is faster."
    )


def _plan_queue(config: PretrainConfig, data: DatasetInfo, megabytes: float) -> QueuePlan | None:
    method = config.method_config
    if not isinstance(method, QueueConfig):
        return None
    both_views = getattr(method, "push", "one") == "both" or getattr(method, "symmetric", False)
    epochs = method.queue_length / (data.images * (2 if both_views else 1))
    share = min(1.0, epochs)
    return QueuePlan(
        method.queue_length, megabytes, epochs, share, getattr(method, "neighbors", None),
        None if data.same_class is None else data.same_class * data.images * share,
    )  # fmt: skip
