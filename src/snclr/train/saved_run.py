"""What a run folder says of its run: the settings to go on with, and the trained method."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import yaml

from snclr.config import MAY_CHANGE_ON_RESUME, PretrainConfig, resolve
from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.train import state
from snclr.train.build import build_method, encoder_spec
from snclr.train.checkpoint import latest_checkpoint
from snclr.train.run_folder import RunFolder

_log = logging.getLogger("snclr")


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml."""
    try:
        saved = yaml.safe_load(path.read_text())
    # PyYAML's safe loader also lets errors of its constructors out: of a date, of a number too long, of deep nesting.
    except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it or start a new run") from error
    if not isinstance(saved, dict):
        raise UserError(f"{path} does not hold the settings of a run; restore it or start a new run")
    return saved


def resume_config(settings: dict[str, Any]) -> PretrainConfig:
    """The saved settings of the run in `out`, with what may change taken from `settings`."""
    path = RunFolder(str(settings.get("out") or "")).config
    if not settings.get("out"):
        raise UserError("out is missing: give the run folder to resume (--out)")
    if not path.is_file():
        return resolve(settings)  # killed before its settings were written: nothing is lost by starting anew
    saved = read_config(path)
    given = {name: value for name, value in settings.items() if value is not None}
    _refuse_change("method", given.get("method", saved.get("method")), saved, given)  # first: it decides on the others
    asked = resolve({**{k: v for k, v in saved.items() if k not in ("resume", "overwrite")}, **given})
    for name, value in asked.to_dict().items():
        if name in given and name not in MAY_CHANGE_ON_RESUME:
            _refuse_change(name, value, saved, given)
    return asked


def _refuse_change(name: str, value: Any, saved: dict[str, Any], given: dict[str, Any]) -> None:
    if value != saved.get(name):
        raise UserError(
            f"the run in {given['out']} has {name}={saved.get(name)!r}, and {name}={value!r} was asked for: a run is"
            " resumed with its own settings. Leave the flag out, or start a new run (another --out, and --init-from for"
            " its weights)."
        )


def load_method(run_path: str | Path, device: torch.device | None = None) -> tuple[Any, PretrainConfig, EncoderSpec]:
    """The whole trained method of a run (encoders, heads, queue) from its last checkpoint, in eval mode."""
    run = RunFolder(run_path)
    if not run.config.is_file():
        raise UserError(f"{run.path} is not a run of snclr: it has no config.yaml. Give the --out of snclr pretrain.")
    config = resolve({**read_config(run.config), "resume": False, "overwrite": False})
    checkpoint = latest_checkpoint(run.checkpoints, _log.warning)
    if checkpoint is None:
        raise UserError(
            f"{run.path} has no checkpoint yet: train first, or go on with snclr pretrain --resume --out {run.path}"
        )
    spec = encoder_spec(config)
    classifier = checkpoint.tensors.get("method/classifier.weight")  # of a method that learns from labels
    method: Any = build_method(config, spec, classes=None if classifier is None else len(classifier))
    state.load_method_state(checkpoint.tensors, method)
    return method.to(device or torch.device("cpu")).eval(), config, spec
