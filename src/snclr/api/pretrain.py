"""`snclr.pretrain` trains an encoder, `snclr.plan` estimates its cost, `snclr.doctor` checks the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.api.early_checks import check_data, check_device, check_numbers, check_pretrain
from snclr.runtime.progress import print_wrapped, set_torch_status
from snclr.runtime.settings import Range

if TYPE_CHECKING:
    from snclr.diagnostics.suite import DoctorResult
    from snclr.train.planning.run_plan import RunPlan
    from snclr.train.pretrain import PretrainResult


def pretrain(*, config: str | Path | None = None, quiet: bool = False, **settings: Any) -> PretrainResult:
    """Pre-train an encoder on images and write a run directory.

    The settings are the fields of `snclr.train.config.PretrainConfig`, such as `data`, `out`, `recipe` or `epochs`. A
    stop signal (Ctrl-C, SIGTERM, SIGUSR1) saves a checkpoint and raises StopRequested; `resume=True` continues.

    Args:
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        quiet: Print no progress.
        settings: Values for the fields of `PretrainConfig`; the recipe supplies the rest.
    """
    note = check_pretrain(settings, config)
    if note and not quiet:
        print_wrapped(f"warning: {note}", sys.stderr)
    set_torch_status()
    from snclr.train.pretrain import pretrain

    return pretrain(config=config, quiet=quiet, **settings)


def plan(
    *, config: str | Path | None = None, steps: int = 10, probe_minutes: float | None = None, quiet: bool = False,
    **settings: Any,
) -> RunPlan:  # fmt: skip
    """Estimate time, memory and disk space of a run by training a few steps of it; nothing is written.

    With several devices or nodes, one rank is measured with its part of the batch. For SNCLR, a minute of training
    also measures the neighbors.

    Args:
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        steps: Training steps to measure; fewer if they take more than a minute.
        probe_minutes: Minutes of training after which the neighbors are measured (0: no such training); by default 1
            for --method snclr.
        quiet: Print no progress.
        settings: Those of `snclr.pretrain`.
    """
    check_numbers(Range(ge=1), steps=steps)
    check_numbers(Range(ge=0), probe_minutes=probe_minutes)
    from snclr.models.names import check_name
    from snclr.train.config import resolve

    run = resolve({**settings, "out": "unused"}, config)
    check_data(run.data)
    check_name(run.encoder)
    check_device(run.device, run.precision)
    from snclr.train.planning.run_plan import plan_run

    return plan_run(settings, config, steps=steps, probe_minutes=probe_minutes, quiet=quiet)


def doctor(
    *, device: str = "auto", devices: str | int = "auto", recipe: str | None = None, only: str = "",
    quick: bool = False,
) -> DoctorResult:  # fmt: skip
    """Check this machine: kernels, methods, precisions, resume, ranks, memory and speed.

    A check that cannot run on this machine has the outcome "not applicable" and a reason. Only temporary files are
    written.

    Args:
        device: Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one.
        devices: Ranks to compare with one rank: a number, or auto for all GPUs (on a CPU: 2).
        recipe: Recipe whose memory and speed are measured (default: resnet50-imagenet on a CUDA GPU, else demo).
        only: Groups of checks to run, with commas between them, e.g. kernels,methods (default: all).
        quick: Use smaller sizes, and omit the largest batch and the gain of --compile.
    """
    set_torch_status()
    from snclr.diagnostics.suite import diagnose

    groups = [name.strip() for name in only.split(",") if name.strip()]
    return diagnose(device, str(devices), recipe, groups, quick=quick)
