"""Predict the cost of a training step on many GPUs with `cost_model.py` and constants measured on this machine.

    python benchmarks/scaling.py                            # about five minutes on two idle cores; prints tables
    python benchmarks/scaling.py --json                     # also prints one JSON object as the last line
    python benchmarks/scaling.py --write docs/reference/scaling.md  # also updates the tables of that page
    python benchmarks/scaling.py --only-model               # counts and predictions only, no timings

Measured are operations, parameters and batch norms of the encoders (counted on meta tensors); CPU rates of matrix
products, search, loss, encoders, memory and kernel launches; latency and bandwidth of collectives between 2 and 4 gloo
ranks; and the collectives and seconds of real training steps. The model is checked against these steps, and then
predicts large jobs: on such cores from the measurements, and on GPUs from data sheets. No GPU was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in cli/main.py

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cost_model as model
from cost_model import A100, H100, V100, Job, Machine, Network
from snclr.train.config import resolve

RECIPES = {"ViT-S/16": "vit-small-imagenet", "ViT-B/16": "vit-base-imagenet", "ResNet-50": "resnet50-imagenet"}
UTILIZATION = {"ViT-S/16": 0.3, "ViT-B/16": 0.35, "ResNet-50": 0.2}
JOBS = [(batch, gpus) for batch in (4096, 32_768) for gpus in (32, 256)]
ROWS, QUEUE, DIM = 256, 32_768, 256
# Steps that are small enough to measure: one network dominated by compute, one by communication.
STEPS: dict[str, dict[str, Any]] = {
    "ViT-S/16, 8 images": {"recipe": "vit-small-imagenet", "batch_size": 8, "queue_length": 8192},
    "resnet10-tiny, 64 images": {"recipe": "demo", "batch_size": 64},
}


def count_networks() -> list[Network]:
    """Count operations, parameters and batch norms of the paper's networks on meta tensors."""
    return [count_network(name, UTILIZATION[name], recipe=recipe) for name, recipe in RECIPES.items()]


def count_network(name: str, utilization: float, **settings: Any) -> Network:
    """Count one network with the heads and the image size of its recipe."""
    from torch.utils.flop_counter import FlopCounterMode

    method, side = build(**settings)
    method = method.to("meta")
    images = torch.empty(2, 3, side, side, device="meta")
    with FlopCounterMode(display=False) as counter:
        method.predictor(method.projector(method.encoder(images)))
    with FlopCounterMode(display=False) as followed:
        method.target_network(images)
    trained = [method.encoder, method.projector, method.predictor]
    return Network(
        name=name, forward=counter.get_total_flops() / 2, momentum_forward=followed.get_total_flops() / 2,
        parameters=sum(p.numel() for part in trained for p in part.parameters() if p.requires_grad),
        norms=sum(map(norms, trained)), momentum_norms=norms(method.target_network), utilization=utilization,
    )  # fmt: skip


def build(**settings: Any) -> tuple[Any, int]:
    """Return a recipe's method and its image size."""
    from snclr.train.build import build_method, encoder_spec

    config = resolve({"data": "unused", "out": "unused", **settings})
    return build_method(config, encoder_spec(config)), config.image_size


def norms(module: torch.nn.Module) -> int:
    """Return the number of batch norms of a module."""
    return sum(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())


def measure_rates(networks: list[Network]) -> dict[str, float]:
    """Measure operations per second on this CPU: matrix product, search, loss, encoder."""
    import timm

    from snclr.methods.common.kernels import Keys, logsumexp, topk

    load, generator = os.getloadavg()[0], torch.Generator().manual_seed(0)
    queue = F.normalize(torch.randn(QUEUE, DIM, generator=generator), dim=1)
    y2 = F.normalize(torch.randn(ROWS, DIM, generator=generator), dim=1)
    z1 = y2.clone().requires_grad_()
    product = median(lambda: y2 @ queue.T)
    search = median(lambda: topk(y2, queue, 30))
    loss = median(lambda: torch.autograd.grad(logsumexp(z1, [Keys(queue)], 0.2).sum(), z1))
    encoder, images = timm.create_model("vit_small_patch16_224", num_classes=0), torch.randn(4, 3, 224, 224)
    passes = median(lambda: encoder(images).sum().backward(), repeats=3)
    operations = 2.0 * ROWS * QUEUE * DIM
    forward = next(n for n in networks if n.name == "ViT-S/16").momentum_forward
    return {
        "product": operations / product,
        "search": operations / search,
        "loss": 2 * operations / loss,
        "encoder": 3 * forward * len(images) / passes,
        "threads": torch.get_num_threads(),
        "load": load,
    }


def median(run: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median seconds of several calls after one warm-up call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_core() -> dict[str, Any]:
    """Measure the rates of one core: products, memory, kernel launches, and the passes of each network."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    queue, y2 = (torch.randn(rows, DIM, generator=generator) for rows in (QUEUE, ROWS))
    dataset, target, one = torch.zeros(2**24), torch.zeros(2**24), torch.zeros(1)
    measured: dict[str, Any] = {
        "product": 2.0 * ROWS * QUEUE * DIM / median(lambda: y2 @ queue.T),
        "memory": 2 * 4 * len(dataset) / median(lambda: target.copy_(dataset)),
        "launch": median(lambda: [one.add_(1) for _ in range(1000)]) / 1000,
    }
    chosen: dict[str, dict[str, Any]] = {**{name: {"recipe": recipe} for name, recipe in RECIPES.items()}, **STEPS}
    for name, settings in chosen.items():
        method, side = build(**settings)
        network = count_network(name, 1.0, **settings)
        images = torch.randn(4 if side > 64 else 64, 3, side, side).contiguous(memory_format=torch.channels_last)
        measured[name] = 3 * network.forward * len(images) / median(partial(both_passes, method, images), repeats=3)
    torch.set_num_threads(threads)
    return measured


def both_passes(method: Any, images: torch.Tensor) -> None:
    method.predictor(method.projector(method.encoder(images))).sum().backward()


def this_machine(core: dict[str, Any], messages: dict[str, Any]) -> Machine:
    """Describe this machine: measured costs of messages; ranks beyond the number of cores share them."""
    share = min(1.0, (os.cpu_count() or 1) / messages["ranks"])
    latency, link = messages["gather_latency"], messages["gather_bandwidth"]
    return Machine(
        name="this machine", peak=core["product"] * share, float32=core["product"] * share,
        memory=core["memory"] * share, launch=core["launch"] / share, start=latency, near_hop=0.0, far_hop=0.0,
        near_link=link, far_link=link, colors=False,
    )  # fmt: skip


def cores_like_these(core: dict[str, Any], pair: dict[str, Any]) -> Machine:
    """Describe many cores, one rank each; half the latency between two ranks is the start, half the hop."""
    half, link = pair["gather_latency"] / 2, pair["gather_bandwidth"]
    return Machine(
        name="cores like these", peak=core["product"], float32=core["product"], memory=core["memory"],
        launch=core["launch"], start=half, near_hop=half, far_hop=half, near_link=link, far_link=link,
        colors=False,
    )  # fmt: skip


def measure_messages(ranks: int) -> dict[str, Any]:
    """Measure latency, bandwidth, and collectives and seconds of real steps with gloo ranks on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__,
            "--inside", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def inside(out: str) -> None:
    """Measure on every rank (run by torchrun); rank 0 writes the file."""
    from snclr.distributed.collectives import all_gather, all_reduce_sum, barrier, rank_and_size
    from snclr.train.pretrain import launch_run

    fabric = launch_run(step_config("resnet10-tiny, 64 images"))
    torch.set_num_threads(1)
    small, large, size = torch.zeros(3, dtype=torch.int64), torch.zeros(2**20), rank_and_size()[1]

    def timed(run: Callable[[], Any], repeats: int) -> float:
        barrier()
        return median(run, repeats)

    gather_small = timed(lambda: all_gather(small), 200)
    reduce_small = timed(lambda: all_reduce_sum(small), 200)
    gather_large = timed(lambda: all_gather(large), 10)
    received = large.numel() * 4 * (size - 1)
    measured = {
        "ranks": size, "gather_latency": gather_small, "reduce_latency": reduce_small,
        "gather_bandwidth": received / (gather_large - gather_small) if size > 1 else math.inf,
        "steps": {name: real_steps(name, fabric) for name in STEPS},
    }  # fmt: skip
    if fabric.is_global_zero:
        Path(out).write_text(json.dumps(measured))
    barrier()


def step_config(name: str) -> Any:
    return resolve({**STEPS[name], "data": "demo", "out": "unused", "workers": 0, "precision": "32"})


def real_steps(name: str, fabric: Any, repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of a training step with a full queue, and its number of collectives."""
    from snclr.distributed.collectives import barrier
    from snclr.train.build import build_task

    config = step_config(name)
    training = build_task(config, fabric)
    method: Any = training.module
    full, generator = method.queue.capacity, torch.Generator().manual_seed(0)
    method.queue.push(torch.randn(full, config.dim, generator=generator), torch.full((full,), len(training.dataset)))
    batches = list(training.loader.batches(0, repeats + 2))
    training.training_step(batches[0])
    counts: dict[str, int] = {}
    with counting(counts):
        training.training_step(batches[1])
    times = []
    for batch in batches[2:]:
        barrier()
        start = time.perf_counter()
        training.training_step(batch)
        barrier()
        times.append(time.perf_counter() - start)
    layers = norms(method.encoder) + norms(method.projector) + norms(method.predictor), norms(method.target_network)
    return {
        "seconds": statistics.median(times), "all_gathers": 0, "all_reduces": 0, **counts,
        "norms": layers[0], "momentum_norms": layers[1],
    }  # fmt: skip


@contextmanager
def counting(counts: dict[str, int]) -> Iterator[None]:
    """Count the collectives of a step: all except the asynchronous all_reduces of the gradients."""
    plain = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not options.get("async_op"):
                counts[f"{name}s"] = counts.get(f"{name}s", 0) + 1
            return plain[name](*arguments, **options)

        return call

    for name in plain:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def network_table(networks: list[Network]) -> str:
    rows = [
        [n.name, f"{n.forward / 1e9:.2f}", f"{n.momentum_forward / 1e9:.2f}", f"{n.parameters / 1e6:.1f}", str(n.norms),
         str(sum(model.norm_messages(n))), f"{n.utilization:.0%}"]
        for n in networks
    ]  # fmt: skip
    head = ["network at 224 px, with heads (counted)", "F, 10⁹ operations", "F′", "trained parameters, 10⁶",
            "batch norms", "collectives per step", "assumed share of peak"]  # fmt: skip
    return table(head, rows)


def rate_table(rates: dict[str, float]) -> str:
    labels = {
        "product": f"matrix product, {ROWS} × {QUEUE:,} × {DIM}", "search": "search (`kernels.topk`, K = 30)",
        "loss": "log-sum-exp with gradient (`kernels.logsumexp`)",
        "encoder": "ViT-S/16, forward and backward, batch 4",
    }  # fmt: skip
    rows = [[text, f"{rates[k] / 1e9:.1f}", f"{rates['product'] / rates[k]:.2f}"] for k, text in labels.items()]
    head = [f"measured, float32, {rates['threads']:.0f} threads, load before {rates['load']:.1f}", "10⁹ operations/s",
            "rate of the matrix product ÷ this"]  # fmt: skip
    return table(head, rows)


def message_table(messages: list[dict[str, Any]]) -> str:
    rows = []
    for m in messages:
        if m["ranks"] == 1:
            continue
        step = m["steps"]["resnet10-tiny, 64 images"]
        n = Network(name="", forward=0, momentum_forward=0, parameters=0, norms=int(step["norms"]),
                    momentum_norms=int(step["momentum_norms"]))  # fmt: skip
        gathers, reduces = model.norm_messages(n)
        rows.append(
            [f"{m['ranks']:.0f}", f"{m['gather_latency'] * 1e6:,.0f}", f"{m['reduce_latency'] * 1e6:,.0f}",
             f"{m['gather_bandwidth'] / 1e9:.2f}", f"{step['all_gathers']:.0f} (model: {gathers + 6})",
             f"{step['all_reduces']:.0f} (model: {reduces + 1})"]
        )  # fmt: skip
    head = ["gloo ranks (measured)", "all_gather latency, µs", "all_reduce latency, µs", "all_gather, 10⁹ bytes/s",
            "all_gathers per step of resnet10-tiny", "all_reduces per step"]  # fmt: skip
    return table(head, rows)


def core_table(core: dict[str, Any]) -> str:
    rows = [
        ["products in float32, 10⁹ operations/s", f"{core['product'] / 1e9:.1f}"],
        ["memory, 10⁹ bytes/s", f"{core['memory'] / 1e9:.1f}"],
        ["kernel launch, µs", f"{core['launch'] * 1e6:.2f}"],
        *([f"{name}, forward and backward, 10⁹ operations/s", f"{core[name] / 1e9:.1f}"] for name in RECIPES),
        ["resnet10-tiny, forward and backward, 10⁹ operations/s", f"{core['resnet10-tiny, 64 images'] / 1e9:.1f}"],
    ]
    return table(["one core (measured)", ""], rows)


def check_table(core: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """Compare real steps with the predictions of the model for this machine."""
    rows = []
    for name, settings in STEPS.items():
        config = step_config(name)
        network = count_network(name, core[name] / core["product"], **settings)
        for m in messages:
            job = Job(batch=config.batch_size, world_size=m["ranks"], queue=config.queue_length, dim=config.dim,
                      neighbors=config.neighbors)  # fmt: skip
            parts = model.step_parts(job, network, this_machine(core, m))
            step, seen = sum(parts.values()), m["steps"][name]["seconds"]
            sent = sum(parts[part] for part in ("gather", "batch norm", "gradient", "agreement"))
            rows.append([name, str(m["ranks"]), f"{seen * 1e3:,.0f}", f"{step * 1e3:,.0f}", f"{step / seen:.2f}",
                         f"{parts['encoder'] / step:.0%}", f"{sent / step:.0%}"])  # fmt: skip
    head = [
        "step",
        "ranks",
        "measured, ms",
        "calculated, ms",
        "ratio",
        "share of the encoder",
        "share of communication",
    ]
    return table(head, rows)


def prediction_table(networks: list[Network], machine: Machine, unit: str = "GPUs") -> str:
    rows = []
    for n in networks:
        for batch, gpus in JOBS:
            parts = model.step_parts(Job(batch=batch, world_size=gpus), n, machine)
            step = sum(parts.values())
            shares = [f"{parts[name] / step:.1%}" for name in parts]
            rows.append([n.name, f"{batch:,}", str(gpus), f"{step * 1e3:,.1f}", *shares])
    head = [f"{machine.name} (calculated)", "batch", unit, "step, ms", *model.step_parts(
        Job(batch=1, world_size=1), networks[0], machine)]  # fmt: skip
    return table(head, rows)


def limit_table(networks: list[Network]) -> str:
    rows = []
    for machine in (H100, A100, V100):
        for n in networks:
            at = [model.queue_at_share(share, n, machine) for share in (0.05, 0.25)]
            rows.append([machine.name, n.name, *(f"{q:,.0f}" for q in at), f"{model.queue_at_memory(1e9):,}",
                         f"{model.queue_at_memory(1e9, queue_bytes=2):,}"])  # fmt: skip
    head = ["GPU (calculated)", "network", "Q: search is 5 % of the encoder", "Q: 25 %", "Q: 1 GB in float32",
            "Q: 1 GB in float16"]  # fmt: skip
    return table(head, rows)


def write(page: Path, sections: dict[str, str]) -> None:
    """Write each table between its two markers."""
    text = page.read_text(encoding="utf-8")
    for name, body in sections.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert marked.search(text), f"{page} has no section marked {name}"
        before, after = marked.split(text, maxsplit=1)[0], marked.split(text, maxsplit=1)[-1]
        text = f"{before}<!-- {name} -->\n{body}\n<!-- /{name} -->{after}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    parser.add_argument("--only-model", action="store_true", help="time nothing")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.inside:
        inside(a.inside)
        return
    networks = count_networks()
    sections = {"networks": network_table(networks)}
    measured: dict[str, Any] = {"networks": [asdict(n) for n in networks]}
    if not a.only_model:
        measured["rates"], measured["core"] = measure_rates(networks), measure_core()
        measured["messages"] = [measure_messages(n) for n in (1, 2, 4)]
        core, messages = measured["core"], measured["messages"]
        own = [replace(n, utilization=core[n.name] / core["product"]) for n in networks]
        sections |= {
            "rates": rate_table(measured["rates"]), "messages": message_table(messages), "core": core_table(core),
            "check": check_table(core, messages),
            "cores": prediction_table(own, cores_like_these(core, messages[1]), "cores"),
        }  # fmt: skip
    sections |= {
        "h100": prediction_table(networks, H100), "a100": prediction_table(networks, A100),
        "v100": prediction_table(networks, V100),
        "limits": limit_table(networks),
    }  # fmt: skip
    print("\n\n".join(sections.values()))
    if a.write:
        write(a.write, sections)
    if a.json:
        measured["predictions"] = [
            {"network": n.name, "gpu": m.name, "batch": b, "gpus": g,
             "seconds": model.step_parts(Job(batch=b, world_size=g), n, m)}
            for n in networks for m in (A100, V100) for b, g in JOBS
        ]  # fmt: skip
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
