"""Encoder snapshots: the weights of the encoder at some steps of a run, without optimizer, heads and queue.

encoders/step-0000000120.safetensors
"""

from __future__ import annotations

import re
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from snclr.checkpoint.run_dir import RunDir
from snclr.io.atomic import write_atomic

_NAME = re.compile(r"step-(\d{10})\.safetensors")


def save_snapshot(run: RunDir, encoder: nn.Module, step: int, *, total_steps: int, keep: int) -> None:
    """Write a snapshot at the first call after each of `keep` evenly spaced steps; `keep` 0 writes none."""
    if keep == 0:
        return
    before = max((known for known in snapshots(run) if known < step), default=0)
    if step * keep // total_steps > before * keep // total_steps:
        run.encoders.mkdir(exist_ok=True)
        state = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
        write_atomic(run.encoders / f"step-{step:010d}.safetensors", safetensors.torch.save(state))


def snapshots(run: RunDir) -> dict[int, Path]:
    """Return the snapshots of a run by step, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in run.encoders.glob("*.safetensors"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def load_snapshot(path: Path) -> dict[str, Tensor]:
    """Return the state of the encoder in a snapshot."""
    return safetensors.torch.load_file(path)
