"""The kernels of the loss and the color stage on the device, against plain references in float64 on the CPU."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.sampler import ViewKey
from snclr.data.transforms.views import VIEW_GROUPS, color_views
from snclr.diagnostics.setup import CheckRow, Setup, exact_float32
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
    size = f"{n} × {m:,} × {d}"
    row = functools.partial(CheckRow.at_most, limit=FLOAT32_ERROR, advice=ADVICE)
    with exact_float32(setup.device):
        yield row(f"top-k search, {size}", topk_error(z, keys, k, setup.device))
        value, gradient = logsumexp_errors(z, keys, setup.device)
        yield row(f"log-sum-exp, {size}, value", value)
        yield row(f"log-sum-exp, {size}, gradient", gradient)
        error = positiveness_error(z, keys[: n * k].view(n, k, d), setup.device)
        yield row(f"positiveness, {n} × {k} × {d}", error)
        if setup.kind == "cpu":
            yield CheckRow("color stage", "not applicable", "the CPU is the reference")
        else:
            yield row("color stage", color_error(setup.device), limit=COLOR_ERROR)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element from a result on the CPU."""
    return float((found.detach().cpu().to(expected.dtype) - expected.detach()).abs().max())


def topk_error(queries: Tensor, keys: Tensor, k: int, device: str) -> float:
    """Return the largest difference of the k best similarities from a full sort; pairs are left out as in training.

    The similarity at each returned index counts too, so a wrong index is an error.
    """
    rows, full = torch.arange(len(queries)), queries.double() @ keys.double().T
    best = full.argmax(dim=1)  # leave out the best key of each row
    values, index = kernels.topk(queries.to(device), keys.to(device), k, exclude=(rows.to(device), best.to(device)))
    index = index.cpu()
    if bool((index < 0).any()):
        return float("inf")
    full[rows, best] = -torch.inf
    expected = full.topk(k, dim=1).values
    return max(largest_difference(values, expected), largest_difference(full.gather(1, index), expected))


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
    return largest_difference(value, expected), largest_difference(gradient, expected_gradient)


def positiveness_error(y1: Tensor, neighbors: Tensor, device: str) -> float:
    """Return the largest difference of the weights from Eq. 4 in float64, with missing neighbors."""
    mask = torch.arange(neighbors.shape[1]) < torch.arange(len(y1))[:, None] + 1  # 1, 2, … neighbors
    w = positiveness(y1.to(device), neighbors.to(device), mask.to(device))
    scores = (y1.double()[:, None] * neighbors.double()).sum(dim=2).exp() * mask
    return largest_difference(w, scores / scores.sum(dim=1, keepdim=True))


def color_error(device: str) -> float:
    """Return the largest difference of a normalized pixel between the device and the CPU, in both views."""
    images = torch.randint(0, 256, (16, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    differences = []
    for view, settings in enumerate(VIEW_GROUPS["byol"]):
        color = functools.partial(color_views, settings=settings, key=ViewKey(0, 0, np.arange(16), view))
        differences.append(largest_difference(color(images.to(device)), color(images)))
    return max(differences)
