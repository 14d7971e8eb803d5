"""Load the trained method of a run from its directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint import state
from snclr.checkpoint.format import latest_checkpoint
from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError, snclr_command
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import PretrainConfig, read_config, resolve

_log = logging.getLogger("snclr")


def load_trained_method(run_path: str | Path, device: torch.device | None = None) -> tuple[Any, PretrainConfig]:
    """Load method (encoders, heads, queue; in eval mode) and config of a run from its last checkpoint."""
    run = RunDir(run_path)
    if not run.config.is_file():
        raise UserError(f"{run.path} is not a run of snclr: it has no config.yaml. Give the --out of snclr pretrain.")
    config = resolve({**read_config(run.config), "resume": False, "overwrite": False})
    checkpoint = latest_checkpoint(run.checkpoints, _log.warning)
    if checkpoint is None:
        command = snclr_command("pretrain", "--resume", "--out", run.path)
        raise UserError(f"{run.path} has no checkpoint yet. Continue it with {command}")
    classifier = checkpoint.tensors.get("method/classifier.weight")  # of a supervised method
    method: Any = build_method(config, encoder_spec(config), classes=None if classifier is None else len(classifier))
    state.load_method_state(checkpoint.tensors, method)
    return method.to(device or torch.device("cpu")).eval(), config
