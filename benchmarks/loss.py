"""Time and memory of the loss: streaming and direct form, each in a fresh process, and a lower bound.

Measures one direction of Eq. 2 with search and gradient, at the paper's size, on random clustered features:

    python benchmarks/loss.py            # about three minutes on two cores; the direct form needs about 11 GB
    python benchmarks/loss.py --json     # the same, with one JSON object as the last line

"direct" is the straightforward form: the full N × Q similarity, one top-k, all N × N(K+1) logits, autograd.
"bound" is the time of three matrix products: N·Q·D for the search, N·(U+N)·D twice for value and gradient, where U is
the number of distinct neighbors in the batch. Memory is the peak of the process minus that of its inputs.
The last lines estimate what a longer queue adds to a ViT-S/16 step of 4096 images. The time of that step is calculated:
the encoder's time per image, measured at a small batch, × 4096, plus the measured loss in both directions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

import torch
import torch.nn.functional as F
from torch import Tensor

TAU = 0.2


def inputs(n: int, q: int, d: int, clusters: int = 1000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y1, z1, y2 (n, d) and the queue (q, d): unit vectors around shared cluster centers."""
    generator = torch.Generator().manual_seed(0)
    centers = F.normalize(torch.randn(clusters, d, generator=generator), dim=1)

    def around(count: int) -> Tensor:
        which = torch.randint(clusters, (count,), generator=generator)
        return F.normalize(centers[which] + torch.randn(count, d, generator=generator) / d**0.5, dim=1)

    return around(n), around(n), around(n), around(q)


def direct(y1: Tensor, z1: Tensor, y2: Tensor, queue: Tensor, k: int) -> Tensor:
    """Compute Eq. 2 to 4 with full matrices."""
    z1 = F.normalize(z1, dim=1)
    index = (y2 @ queue.T).topk(k, dim=1).indices
    neighbors = queue[index]  # (N, K, D)
    w = torch.einsum("nd,nkd->nk", y1, neighbors).softmax(dim=1)
    keys = torch.cat([y2[:, None], neighbors], dim=1)  # (N, K+1, D)
    logits = (z1 @ keys.flatten(0, 1).T / TAU).view(len(z1), len(z1), k + 1)
    own = logits[torch.arange(len(z1)), torch.arange(len(z1))]
    numerator = (own + torch.cat([torch.zeros_like(w[:, :1]), w.log()], dim=1)).logsumexp(dim=1)
    return (logits.flatten(1).logsumexp(dim=1) - numerator).mean()


def measure(form: str, n: int, k: int, q: int, d: int, repeats: int) -> dict[str, float]:
    """Return seconds and peak megabytes of one form; for "bound" the seconds and the number of distinct keys."""
    y1, z1, y2, queue = inputs(n, q, d)
    z1.requires_grad_()
    if form == "bound":
        from snclr.methods.common.queue import nearest_neighbors

        used = len(set(nearest_neighbors(y2, queue, k).index.flatten().tolist())) + n
        return {"seconds": best(lambda: products(y2, queue, used), repeats), "used": used}
    if form == "streaming":
        from snclr.methods.snclr.loss import SoftNeighborLoss

        criterion = SoftNeighborLoss(dim=d, queue_length=q, neighbors=k, temperature=TAU)
        criterion.queue.push(queue, torch.arange(q))
        del queue
        ids = torch.arange(q, q + n)

        def step() -> Tensor:
            return criterion(y1, z1, y2, ids).loss
    else:

        def step() -> Tensor:
            return direct(y1, z1, y2, queue, k)

    def once() -> None:
        z1.grad = None
        step().backward()  # type: ignore[no-untyped-call]

    before = reset_peak()
    seconds = best(once, repeats)
    assert z1.grad is not None
    return {
        "seconds": seconds,
        "megabytes": peak() - before,
        "loss": float(step().detach()),
        "gradient": float(z1.grad.double().norm()),
    }


def products(y2: Tensor, queue: Tensor, used: int) -> None:
    """Compute the three matrix products, tile by tile into one buffer."""
    tile = 2048
    buffer = torch.empty(len(y2), tile)
    total = torch.zeros_like(y2)
    for start in range(0, len(queue), tile):
        keys = queue[start : start + tile]
        torch.mm(y2, keys.T, out=buffer[:, : len(keys)])
    for start in range(0, used, tile):
        keys = queue[start : min(start + tile, used)]
        scores = buffer[:, : len(keys)]
        torch.mm(y2, keys.T, out=scores)
        total.addmm_(scores, keys)


def best(run: Callable[[], None], repeats: int) -> float:
    """Return the seconds of the fastest run: noise only adds time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def reset_peak() -> float:
    """Reset the peak memory of the process (Linux) and return its current memory in megabytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak() -> float:
    return status("VmHWM")


def status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def vit_step_seconds(images: int) -> float:
    """Return the seconds per image of a ViT-S/16 step at 224 pixels: two passes with gradient, two of the target."""
    from snclr.models.encoders import build_encoder, resolve_encoder

    encoder = build_encoder(resolve_encoder("vit_small", image_size=224))
    x = torch.randn(images, 3, 224, 224)

    def trained() -> None:
        encoder(x).sum().backward()

    def momentum() -> None:
        with torch.no_grad():
            encoder(x)

    trained()
    return 2 * (best(trained, 3) + best(momentum, 3)) / images


def in_fresh_process(arguments: list[str]) -> dict[str, Any]:
    out = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=30)
    parser.add_argument("--q", type=int, default=128_000)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=("direct", "streaming", "bound", "vit"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.form == "vit":
        print(json.dumps({"seconds": vit_step_seconds(8)}))
        return
    if a.form:
        print(json.dumps(measure(a.form, a.n, a.k, a.q, a.d, a.repeats)))
        return

    def run(form: str, q: int) -> dict[str, Any]:
        flags = {"n": a.n, "k": a.k, "q": q, "d": a.d, "repeats": a.repeats}
        return in_fresh_process(["--form", form, *(f"--{name}={value}" for name, value in flags.items())])

    bound, streaming, plain = run("bound", a.q), run("streaming", a.q), run("direct", a.q)
    short = run("streaming", a.q // 16)
    per_image = in_fresh_process(["--form", "vit"])["seconds"]
    encoders = per_image * a.n
    growth = 2 * (streaming["seconds"] - short["seconds"]) / (encoders + 2 * short["seconds"])
    result = {
        "direct_s": plain["seconds"],
        "streaming_s": streaming["seconds"],
        "bound_s": bound["seconds"],
        "direct_mb": plain["megabytes"],
        "streaming_mb": streaming["megabytes"],
        "speed_over_direct": plain["seconds"] / streaming["seconds"],
        "time_over_bound": streaming["seconds"] / bound["seconds"],
        "memory_share_of_direct": streaming["megabytes"] / plain["megabytes"],
        "loss_difference": abs(plain["loss"] - streaming["loss"]),
        "gradient_norm_difference": abs(plain["gradient"] - streaming["gradient"]) / plain["gradient"],
        "distinct_keys": bound["used"],
        "streaming_short_queue_s": short["seconds"],
        "vit_s_step_s_calculated": encoders,
        "queue_growth_share_of_vit_s_step": growth,
        "n": a.n,
        "k": a.k,
        "q": a.q,
        "d": a.d,
        "threads": torch.get_num_threads(),
    }
    print(f"N={a.n} K={a.k} Q={a.q} D={a.d}, {torch.get_num_threads()} threads, best of {a.repeats}\n")
    print(f"{'':12}{'seconds':>10}{'MB over inputs':>16}")
    print(f"{'direct':12}{plain['seconds']:10.2f}{plain['megabytes']:16.0f}")
    print(f"{'streaming':12}{streaming['seconds']:10.2f}{streaming['megabytes']:16.0f}")
    print(f"{'bound':12}{bound['seconds']:10.2f}{'':>16}   (search, value, gradient; {bound['used']} distinct keys)\n")
    print(f"speedup over direct     {result['speed_over_direct']:.2f} ×")
    print(f"memory relative to it   {result['memory_share_of_direct']:.1%}")
    print(f"time relative to bound  {result['time_over_bound']:.2f} ×")
    print(f"loss difference         {result['loss_difference']:.1e}")
    print(f"gradient norm differs   {result['gradient_norm_difference']:.1e} (relative)")
    print(
        f"\nqueue {a.q // 16:,} → {a.q:,}: {short['seconds']:.2f} → {streaming['seconds']:.2f} s per direction,"
        f" {growth:+.2%} of a ViT-S/16 step of {a.n} images"
        f"\n(calculated: {per_image:.3f} s per image for the encoder passes, measured at batch 8, × {a.n})"
    )
    if a.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
