"""The config of a run that is resumed: its own settings, of which some may change. Free of torch."""

from __future__ import annotations

from typing import Any

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError, known_spelling
from snclr.methods.config import METHODS
from snclr.runtime.settings import current_name
from snclr.train.config import MAY_CHANGE_ON_RESUME, PretrainConfig, read_config, resolve


def config_for_resume(settings: dict[str, Any]) -> PretrainConfig:
    """Return the saved config of the run in `out`, with those of `settings` that may change."""
    if not settings.get("out"):
        raise UserError("out is missing. Give the run directory to resume.")
    path = RunDir(str(settings["out"])).config
    if not path.is_file():
        return resolve(settings)  # killed before its settings were written, so nothing is lost
    saved = {**read_config(path), "resume": False, "overwrite": False}
    given = {current_name(name): value for name, value in settings.items() if value is not None}
    if given.get("momentum") == "auto":  # the run has the number that was computed at its start
        del given["momentum"]
    # The method determines the other settings.
    _refuse_change("method", known_spelling(str(given.get("method", saved.get("method"))), METHODS), saved, given)
    resumed = resolve({**saved, **given})
    for name, value in resumed.to_dict().items():
        if name in given and name not in MAY_CHANGE_ON_RESUME:
            _refuse_change(name, value, saved, given)
    return resumed


def _refuse_change(name: str, value: Any, saved: dict[str, Any], given: dict[str, Any]) -> None:
    if value != saved.get(name):
        raise UserError(
            f"the run in {given['out']} has {name}={saved.get(name)!r}, not {name}={value!r}: a run is resumed with its"
            " own settings. Omit it, or start a new run with another --out and --init-from."
        )
