"""The kernels of the loss and the color stage on the device, against plain references in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.transforms.views import VIEW_GROUPS, color_views
from snclr.diagnostics.results import CheckRow, at_most, not_applicable
from snclr.diagnostics.setup import Setup, exact_float32
from snclr.methods.common import kernels
from snclr.methods.common.kernels import Keys
from snclr.methods.snclr.loss import positiveness

ADVICE = "A kernel of this device or torch version computes wrong values: update the driver and torch."
TAU = 0.2
FLOAT32_ERROR = 1e-4
"""Limit of a float32 result against float64; logits go up to 1/τ = 5, and rounding is about 1e-6."""
COLOR_ERROR = 1e-3
"""Limit of a normalized pixel; a gray level is 0.017."""


def check_kernels(setup: Setup) -> Iterator[CheckRow]:
    """Compare top-k search, streaming log-sum-exp, positiveness and the color stage with their plain forms."""
    n, m, d, k = (64, 20_000, 64, 20) if setup.kind == "cpu" or setup.quick else (512, 128_000, 256, 30)
    generator = torch.Generator().manual_seed(0)
    z, keys = (F.normalize(torch.randn(rows, d, generator=generator), dim=1) for rows in (n, m))
    name = f"{n} × {m:,} × {d}"
    with exact_float32():
        yield at_most(
            "kernels", f"top-k search, {name}", topk_error(z, keys, k, setup.device), FLOAT32_ERROR, advice=ADVICE
        )
        value, gradient = logsumexp_errors(z, keys, setup.device)
        yield at_most("kernels", f"log-sum-exp, {name}, value", value, FLOAT32_ERROR, advice=ADVICE)
        yield at_most("kernels", f"log-sum-exp, {name}, gradient", gradient, FLOAT32_ERROR, advice=ADVICE)
        error = positiveness_error(z, keys[: n * k].view(n, k, d), setup.device)
        yield at_most("kernels", f"positiveness, {n} × {k} × {d}", error, FLOAT32_ERROR, advice=ADVICE)
        name = "color stage"
        if setup.kind == "cpu":
            yield not_applicable("kernels", name, "the CPU is the reference")
        else:
            yield at_most("kernels", name, color_error(setup.device), COLOR_ERROR, advice=ADVICE)


def topk_error(queries: Tensor, keys: Tensor, k: int, device: str) -> float:
    """Return the largest difference of the k best similarities from a full sort; pairs are left out as in training.

    The similarity at each returned index counts too, so a wrong index is an error.
    """
    rows = torch.arange(len(queries))
    best = (queries.double() @ keys.double().T).argmax(dim=1)  # leave out the best key of each row
    values, index = kernels.topk(queries.to(device), keys.to(device), k, exclude=(rows.to(device), best.to(device)))
    values, index = values.cpu().double(), index.cpu()
    if bool((index < 0).any()):
        return float("inf")
    full = queries.double() @ keys.double().T
    full[rows, best] = -torch.inf
    expected = full.topk(k, dim=1).values
    at_index = full.gather(1, index)
    return max(float((values - expected).abs().max()), float((at_index - expected).abs().max()))


def logsumexp_errors(z: Tensor, keys: Tensor, device: str) -> tuple[float, float]:
    """Return the largest differences of value and gradient from the plain log-sum-exp in float64."""
    counts = torch.arange(len(keys)) % 3 + 1
    on_device = z.to(device).clone().requires_grad_()
    sets = [Keys(z.to(device)), Keys(keys.to(device), torch.arange(len(keys), device=device), counts.to(device))]
    value = kernels.logsumexp(on_device, sets, TAU)
    (gradient,) = torch.autograd.grad(value.sum(), on_device)
    plain = z.double().requires_grad_()
    logits = torch.cat([plain @ z.double().T / TAU, plain @ keys.double().T / TAU + counts.double().log()], dim=1)
    expected = logits.logsumexp(dim=1)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), plain)
    return (
        float((value.detach().cpu().double() - expected.detach()).abs().max()),
        float((gradient.cpu().double() - expected_gradient).abs().max()),
    )


def positiveness_error(y1: Tensor, neighbors: Tensor, device: str) -> float:
    """Return the largest difference of the weights from Eq. 4 in float64, with missing neighbors."""
    mask = torch.arange(neighbors.shape[1]) < torch.arange(len(y1))[:, None] + 1  # 1, 2, … neighbors
    w = positiveness(y1.to(device), neighbors.to(device), mask.to(device)).cpu().double()
    scores = (y1.double()[:, None] * neighbors.double()).sum(dim=2).exp() * mask
    return float((w - scores / scores.sum(dim=1, keepdim=True)).abs().max())


def color_error(device: str) -> float:
    """Return the largest difference of a normalized pixel between the device and the CPU, in both views."""
    images = torch.randint(0, 256, (16, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ids = np.arange(len(images))
    largest = 0.0
    for view, settings in enumerate(VIEW_GROUPS["byol"]):
        expected, found = (
            color_views(images.to(where), settings, seed=0, epoch=0, ids=ids, view=view).cpu()
            for where in ("cpu", device)
        )
        largest = max(largest, float((expected - found).abs().max()))
    return largest
