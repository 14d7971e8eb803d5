"""Real runs of four steps: uninterrupted against resumed in another process, and one rank against several."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint.format import latest_checkpoint
from snclr.checkpoint.run_dir import RunDir
from snclr.diagnostics.setup import CheckRow, Setup, write_photos
from snclr.train.metrics import read_metrics
from snclr.train.pretrain import pretrain

STEPS = 4
"""Steps of an uninterrupted run."""
RESUME_AT = 2
"""Step from whose checkpoint a run is resumed."""
PROCESS_SECONDS = 300.0
"""Seconds after which a process of a check counts as hung."""
RANKS_ERROR = 1e-5
"""Largest relative difference of a loss between numbers of ranks, in float64; losses are recorded in float32."""


def check_resume(setup: Setup) -> Iterator[CheckRow]:
    """Compare four steps with a resume after two of them in another process: the result must have the same bits.

    On a GPU both run with --deterministic, without which equal bits are not promised.
    """
    whole, resumed = setup.folder / "whole", setup.folder / "resumed"
    on_gpu = setup.kind == "cuda"
    settings = {**run_settings(setup, whole), "deterministic": on_gpu, "checkpoint_every": RESUME_AT}
    if on_gpu:  # in a new process: cuBLAS reads the setting before its first product
        run_snclr("pretrain", *flags({**settings, "keep_checkpoints": STEPS}))
    else:
        pretrain(**settings, keep_checkpoints=STEPS, quiet=True)
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns(f"step-{STEPS:010}", "encoder*"))
    run_snclr("pretrain", "--resume", "--out", resumed)
    expected, found = end_state(whole), end_state(resumed)
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    yield CheckRow.verdict(
        f"{STEPS} steps against {RESUME_AT} + resume + {STEPS - RESUME_AT}", not different,
        value=f"{len(different)} of {len(expected)} tensors differ", limit="bit-identical",
        advice="Algorithms of the device are not deterministic: a resumed run is right but not bit-identical."
        " docs/reliability.md says what is promised.",
        number=len(different), details=tuple(different[:10]),
    )  # fmt: skip


def check_ranks(setup: Setup) -> Iterator[CheckRow]:
    """Compare the losses of four steps on one rank and on several, in float64."""
    if setup.ranks < 2:
        reasons = {"cuda": "there is one GPU, or --devices is 1", "mps": "Apple GPUs support one rank"}
        yield CheckRow("1 rank against several", "not applicable", reasons.get(setup.kind, "--devices is 1"))
        return
    one, several = setup.folder / "one-rank", setup.folder / "several-ranks"
    settings = run_settings(setup, one, precision="64")
    pretrain(**settings, quiet=True)
    run_snclr("pretrain", *flags({**settings, "out": several, "device": setup.kind, "devices": setup.ranks}))
    losses, other = ([record["loss"] for record in read_metrics(run)] for run in (one, several))
    error = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, other, strict=True))
    yield CheckRow.at_most(
        f"1 rank against {setup.ranks}", error, RANKS_ERROR,
        advice="Communication between the ranks is wrong: update the driver and NCCL; try NCCL_P2P_DISABLE=1.",
        details=tuple(f"step {step}: {a:.9g}, {b:.9g}" for step, (a, b) in enumerate(zip(losses, other, strict=True))),
    )  # fmt: skip


def run_settings(setup: Setup, out: Path, precision: str = "32") -> dict[str, Any]:
    """Return the settings of a run of four steps on image files."""
    batch = 8 * max(setup.ranks, 2)
    photos = write_photos(setup.folder, STEPS * batch)
    return {
        "data": str(photos), "out": str(out), "recipe": "photos", "encoder": "resnet10-tiny", "image_size": 32,
        "batch_size": batch, "epochs": 1, "warmup_epochs": 0, "neighbors": 3, "queue_length": 2 * batch, "hidden": 32,
        "dim": 16, "optimizer": "sgd", "lr": 0.4, "clip_gradient": 1.0, "workers": 1, "threads": 1, "log_every": 1,
        "device": setup.device, "precision": precision,
    }  # fmt: skip


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as arguments of the command line.

    >>> flags({"batch_size": 8, "deterministic": True})
    ['--batch-size=8', '--deterministic']
    """
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()]


def run_snclr(*arguments: object) -> None:
    """Run a command of the package in another process; raise RuntimeError with its last lines if it fails."""
    command = [sys.executable, "-m", "snclr", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"`snclr {arguments[0]}` ended with {done.returncode}: {last}")


def end_state(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint of a run, which must be that of the last step."""
    checkpoint = latest_checkpoint(RunDir(run).checkpoints, warn=print)
    if checkpoint is None or checkpoint.step != STEPS:
        raise RuntimeError(f"{run.name} has no checkpoint of step {STEPS}")
    return checkpoint.tensors
