"""Kernels, bytes moved, host waits and calculated milliseconds of the parts of a step on a GPU, without a GPU.

    python benchmarks/device.py            # 512 images per GPU, Q = 128,000; about a minute on one core
    python benchmarks/device.py --json     # the same, with one JSON object as the last line

The code of the package runs on meta tensors, which have shapes but no values, and every operation is counted. A size
that depends on values is given: U distinct neighbors (cost_model.py), no image of the batch in the queue. The color
stage is compiled on a GPU; its kernels are those of inductor's scheduler (compiled_kernels.py). Calculated for each
kernel: the longest of its launch, its bytes over the memory bandwidth, its operations over the rate of matrix products
(data sheets in cost_model.py), and for compiled kernels its instructions over 70 % of 64 per clock and multiprocessor.
The encoder runs in bf16 and the loss in float32. No GPU was measured.

color      both views of all images, from uint8 to normalized float32 in the memory format of training
eager      the same without torch.compile: transform by transform
search     the nearest entries of the queue, for both views
lse        log-sum-exp over batch and neighbors with its gradient, in both directions
loss       positiveness, lse and the rest of Eq. 2 with its gradient, in both directions
encoder    forward and backward of the encoder, and forward of the target encoder, for both views
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import site
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from compiled_kernels import compiled_kernels
from cost_model import A100, H100, Job, Machine, distinct_picks
from snclr.data.sampler import ViewKey
from snclr.data.transforms import compiled_color, views
from snclr.data.transforms.compiled_color import fused_color
from snclr.methods.common import kernels
from snclr.methods.common.kernels import Keys
from snclr.methods.snclr.loss import SoftNeighborLoss
from snclr.models.encoders import build_encoder
from snclr.train.build import encoder_spec, view_settings
from snclr.train.config import PretrainConfig, resolve

MACHINES = (A100, H100)
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
"""Operations whose result the host has to read."""
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
PRODUCT_SHARE = 0.7
"""Share of the peak of the data sheet that products and convolutions reach; bandwidths in cost_model.py have theirs."""


@dataclass
class Counts:
    """What was counted in a part, and the seconds calculated for each machine."""

    kernels: int = 0
    bytes: int = 0
    operations: int = 0
    host_waits: int = 0
    seconds: dict[str, float] | None = None

    def add(self, moved: int, operations: int, half: bool, instructions: int = 0) -> None:
        """Add a kernel; `half` if its products run in half precision."""
        self.kernels += 1
        self.bytes += moved
        self.operations += operations
        self.seconds = self.seconds or dict.fromkeys((machine.name for machine in MACHINES), 0.0)
        for machine in MACHINES:
            products = kernel_seconds(machine, moved, operations, half=half)
            self.seconds[machine.name] += max(products, instructions / machine.instructions)


def kernel_seconds(machine: Machine, moved: int, operations: int, *, half: bool) -> float:
    """Return the longest of launch, memory traffic and products of one kernel."""
    rate = PRODUCT_SHARE * machine.peak if half else machine.float32
    return max(machine.launch, moved / machine.memory, operations / rate)


class Counter(TorchDispatchMode):
    """Count the operations on meta tensors in the block, which stand for those on a GPU."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, overload = func.overloadpacket.__name__, func._overloadname
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(t.device.type == "meta" for t in given)
        out = self._run(func, name, args, kwargs) if on_device else func(*args, **kwargs)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not on_device and all(t.device.type != "meta" for t in results):
            return out
        blocking = name in ("_to_copy", "copy_") and _crosses(given, results) and not kwargs.get("non_blocking")
        if name in WAITING or (name, overload) == ("repeat_interleave", "Tensor") or blocking:
            self.counts.host_waits += 1
        if not (func.is_view or name in ALLOCATING):
            moved = sum(t.nbytes for t in (*given, *results))
            count = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))  # addmm_ as addmm
            operations = 0 if count is None else int(count(*args, **kwargs, out_val=out))
            self.counts.add(moved, operations, half=any(t.dtype == torch.bfloat16 for t in given))
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation; return a tensor of the given size if its size depends on values."""
        if name == "nonzero":
            return torch.empty(self.sizes["nonzero"], args[0].ndim, dtype=torch.int64, device="meta")
        if name == "repeat_interleave" and func._overloadname == "Tensor":
            return torch.empty(self.sizes["repeat_interleave"], dtype=torch.int64, device="meta")
        return func(*args, **kwargs)


class FusedAttention(TorchFunctionMode):
    """Use flash attention, as a GPU does in bf16; meta tensors would use the form with the whole matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        return func(*args, **(kwargs or {}))


def _crosses(given: list[Tensor], results: list[Tensor]) -> bool:
    """Return whether a copy is between host and device."""
    return len({t.device.type == "meta" for t in (*given, *results)}) == 2


@contextmanager
def counted(job: Job) -> Iterator[Counts]:
    """Count the block."""
    sizes = {"nonzero": round(distinct_picks(job)), "repeat_interleave": 0}
    with FusedAttention(), Counter(sizes) as counter:
        yield counter.counts


def count_parts(config: PretrainConfig, job: Job) -> dict[str, Counts]:
    """Count every part of a step of one rank."""
    parts = {
        "eager": color_part(config, job),
        "search": search_part(config, job),
        "lse": lse_part(config, job),
        "loss": loss_part(config, job),
        "encoder": encoder_part(config, job),
    }
    found = {"color": compiled_color_counts(config, job)}
    for name, part in parts.items():
        with counted(job) as counts:
            part()
        found[name] = counts
    return found


def compiled_color_counts(config: PretrainConfig, job: Job) -> Counts:
    """Count the color stage as a GPU runs it: the copy of the parameters and the compiled kernels of each view."""
    calls: list[tuple[list[tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]] = []

    def record(*given: Any, channels_last: bool) -> Tensor:
        *tensors, steps = given
        calls.append(([(tuple(t.shape), t.dtype) for t in tensors], {"steps": steps, "channels_last": channels_last}))
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(tensors[0].shape, device="meta", memory_format=memory_format)

    with (
        mock.patch.object(compiled_color, "COMPILED_DEVICES", {"meta"}),
        mock.patch.object(views, "compiled_color", record),
    ):
        part = color_part(config, job)
        part()  # copies the constants, once per process
        calls.clear()
        with counted(job) as counts:
            part()
    # A process of its own: where CUDA was initialized before, and failed for want of a driver, tracing fails too.
    spawn, folder = multiprocessing.get_context("spawn"), str(Path(__file__).parent)
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=site.addsitedir, initargs=(folder,)) as process:
        for shapes, options in calls:
            fused = functools.partial(fused_color, **options)
            for kernel in process.submit(compiled_kernels, fused, shapes, compiled_color.known_options()).result():
                counts.add(kernel.bytes, 0, half=False, instructions=kernel.instructions)
    return counts


def color_part(config: PretrainConfig, job: Job) -> Callable[[], None]:
    side, ids = config.image_size, np.arange(int(job.rows))
    images = torch.empty(len(ids), 3, side, side, dtype=torch.uint8, device="meta")

    def run() -> None:
        for view, settings in enumerate(view_settings(config)):
            views.color_views(images, settings, ViewKey(0, 0, ids, view), torch.channels_last)

    return run


def search_part(config: PretrainConfig, job: Job) -> Callable[[], None]:
    criterion, (y, _, _), ids = loss_inputs(config, job)

    def run() -> None:
        own = criterion.queue.own_entries(ids)
        for _ in range(2):
            criterion.search(y, ids, own_entries=own)

    return run


def lse_part(config: PretrainConfig, job: Job) -> Callable[[], None]:
    picks = round(distinct_picks(job))
    z = torch.empty(int(job.rows), job.dim, device="meta", requires_grad=True)
    batch, queue = (torch.empty(rows, job.dim, device="meta") for rows in (job.batch, job.queue))
    index, count = (torch.empty(picks, dtype=torch.int64, device="meta") for _ in range(2))

    def run() -> None:
        for _ in range(2):
            torch.autograd.grad(kernels.logsumexp(z, [Keys(batch), Keys(queue, index, count)], 0.2).sum(), z)

    return run


def loss_part(config: PretrainConfig, job: Job) -> Callable[[], None]:
    criterion, (y1, z1, y2), ids = loss_inputs(config, job)
    found = criterion.search(y2, ids, own_entries=(ids[:0], ids[:0]))

    def gather(tensor: Tensor) -> Tensor:
        return torch.empty(job.batch, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    def run() -> None:
        for _ in range(2):
            loss = criterion(y1, z1, y2, ids, neighbors=found, same_view=y2, all_gather=gather).loss
            torch.autograd.grad(loss, z1)

    return run


def loss_inputs(config: PretrainConfig, job: Job) -> tuple[SoftNeighborLoss, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the loss with a full queue, y1, z1, y2 and the ids of the batch."""
    options = {"neighbors": job.neighbors, "temperature": config.temperature}
    criterion = SoftNeighborLoss(job.dim, job.queue, **options).to("meta")
    criterion.queue.push(torch.empty(job.queue, job.dim, device="meta"), torch.empty(job.queue, device="meta").long())
    y1, z1, y2 = (torch.empty(int(job.rows), job.dim, device="meta") for _ in range(3))
    return criterion, (y1, z1.requires_grad_(), y2), torch.empty(int(job.rows), dtype=torch.int64, device="meta")


def encoder_part(config: PretrainConfig, job: Job) -> Callable[[], None]:
    spec = encoder_spec(config)
    with torch.device("meta"):
        encoder = build_encoder(spec).to(torch.bfloat16).to(memory_format=torch.channels_last)
    side = config.image_size
    view = torch.empty(int(job.rows), 3, side, side, device="meta", dtype=torch.bfloat16)
    view = view.contiguous(memory_format=torch.channels_last)

    def run() -> None:
        for _ in range(2):
            with torch.no_grad():
                encoder(view)
            encoder(view).float().sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--recipe", action="append", help="recipes to count (default: ViT-S and ResNet-50 on ImageNet)")
    parser.add_argument("--images", type=int, default=512, help="images per GPU")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--queue", type=int, default=128_000)
    parser.add_argument("--image-size", type=int, help="side of the views (default: the recipe's)")
    a = parser.parse_args()
    result = {}
    for recipe in a.recipe or ["vit-small-imagenet", "resnet50-imagenet"]:
        config = resolve({"recipe": recipe, "data": "unused", "out": "unused", "image_size": a.image_size})
        job = Job(batch=a.images * a.gpus, world_size=a.gpus, queue=a.queue, dim=config.dim, neighbors=config.neighbors)
        parts = count_parts(config, job)
        title = f"{recipe}, {config.image_size} px, {a.images} images per GPU, {a.gpus} GPUs, Q = {a.queue:,}"
        print(table(title, parts))
        result[recipe] = {name: asdict(counts) for name, counts in parts.items()}
    if a.json:
        print(json.dumps(result))


def table(title: str, parts: dict[str, Counts]) -> str:
    """Return the counts as aligned columns, each time beside its share of the encoder's."""
    head = f"{'':10}{'kernels':>9}{'GB moved':>10}{'host waits':>12}" + "".join(
        f"{f'{machine.name}, ms':>12}{'of encoder':>12}" for machine in MACHINES
    )
    lines = [title, head]
    encoder = parts["encoder"].seconds or {}
    for name, counts in parts.items():
        seconds = counts.seconds or dict.fromkeys(encoder, 0.0)
        times = "".join(f"{1000 * seconds[m.name]:12.1f}{seconds[m.name] / encoder[m.name]:12.1%}" for m in MACHINES)
        lines.append(f"{name:10}{counts.kernels:9,}{counts.bytes / 1e9:10.1f}{counts.host_waits:12}{times}")
    return "\n".join([*lines, "(counted; milliseconds calculated from data sheets; no GPU was measured)", ""])


if __name__ == "__main__":
    main()
