"""Load a run from its directory: the config for a resume, without torch, or the trained method."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError, snclr_command
from snclr.runtime.settings import current_name
from snclr.train.config import MAY_CHANGE_ON_RESUME, PretrainConfig, config_value, read_config, resolve

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("snclr")


def config_for_resume(settings: dict[str, Any]) -> PretrainConfig:
    """Return the saved config of the run in `out`, with those of `settings` that may change.

    A setting that may not change can be given with the value that it has.
    """
    if not settings.get("out"):
        raise UserError("out is missing. Give the run directory to resume.")
    path = RunDir(str(settings["out"])).config
    if not path.is_file():
        return resolve(settings)  # killed before its settings were written, so nothing is lost
    saved = {**read_config(path), "resume": False, "overwrite": False}
    given = {current_name(name): value for name, value in settings.items() if value is not None}
    if given.get("momentum") == "auto":  # the run has the number that was computed at its start
        del given["momentum"]
    current = resolve(saved).to_dict()
    # First the method, which determines the other settings; `resolve` refuses those that it does not use.
    for name in sorted(given, key=lambda name: name != "method"):
        if name in current and name not in MAY_CHANGE_ON_RESUME:
            value = config_value(name, given[name])
            if value != current[name]:
                raise UserError(
                    f"the run in {given['out']} has {name}={current[name]!r}, not {name}={value!r}: a run is resumed"
                    " with its own settings. Omit it, or start a new run with another --out and --init-from."
                )
    return resolve({**saved, **given})


def load_trained_method(run_path: str | Path, device: torch.device | str = "cpu") -> tuple[Any, PretrainConfig]:
    """Load method (encoders, heads, queue; in eval mode) and config of a run from its last checkpoint."""
    from snclr.checkpoint.format import latest_checkpoint
    from snclr.checkpoint.state import load_method_state
    from snclr.train.build import build_method, encoder_spec

    run = RunDir(run_path)
    if not run.config.is_file():
        raise UserError(f"{run.path} is not a run of snclr: it has no config.yaml. Give the --out of snclr pretrain.")
    config = resolve({**read_config(run.config), "resume": False, "overwrite": False})
    checkpoint = latest_checkpoint(run.checkpoints, _log.warning)
    if checkpoint is None:
        command = snclr_command("pretrain", "--resume", "--out", run.path)
        raise UserError(f"{run.path} has no checkpoint yet. Continue it with {command}")
    # The classifier of a supervised method and a memory bank have the size of the data.
    classes, images = (
        len(checkpoint.tensors[name]) if name in checkpoint.tensors else None
        for name in ("method/classifier.weight", "method/bank.features")
    )
    method: Any = build_method(config, encoder_spec(config), classes, images)
    load_method_state(checkpoint.tensors, method)
    return method.to(device).eval(), config
