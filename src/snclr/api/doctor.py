"""`snclr.doctor` checks that training computes the right values on this machine, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snclr.diagnostics.results import DoctorResult


def doctor(
    *, device: str = "auto", devices: str | int = "auto", recipe: str | None = None, only: str = "",
    quick: bool = False,
) -> DoctorResult:  # fmt: skip
    """Check this machine: kernels, methods, precisions, resume, ranks, memory and speed. Nothing is written.

    A check that cannot run on this machine has the outcome "not applicable" and a reason.

    Args:
        device: Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one.
        devices: Ranks of the check of several ranks: a number, or auto for all GPUs (on a CPU: 2).
        recipe: Recipe whose memory and speed are measured (default: resnet50-imagenet on a CUDA GPU, else demo).
        only: Groups of checks to run, with commas between them, e.g. kernels,methods (default: all).
        quick: Use smaller sizes and omit the search of the largest batch and the gain of --compile.
    """
    from snclr.diagnostics.suite import diagnose

    groups = [name.strip() for name in only.split(",") if name.strip()]
    return diagnose(device=device, devices=str(devices), recipe=recipe, only=groups, quick=quick)
