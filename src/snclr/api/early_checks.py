"""Checks of paths and numbers that need no torch: a typo is reported before seconds of imports.

The functions that do the work check again. In a job of several ranks only they check, since their errors end all
ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import UserError
from snclr.runtime.stop import STARTED_BY

if TYPE_CHECKING:
    from snclr.train.config import PretrainConfig


def check_run_and_data(run: str | Path, *data: str | Path | None) -> None:
    """Raise UserError if there is no run, or if nothing is found for data that was given."""
    if _has_other_ranks():
        return
    from snclr.checkpoint.run_dir import open_run

    open_run(run)
    check_data(*data)


def check_data(*data: str | Path | None) -> None:
    """Raise UserError if nothing is found for data that was given."""
    if not _has_other_ranks():
        from snclr.data.datasets.base import check_spec

        for spec in data:
            if spec:
                check_spec(spec)


def check_numbers(minimum: float, **values: float | None) -> None:
    """Raise UserError for a number below the minimum; None is a default."""
    for name, value in values.items():
        if value is not None and not minimum <= value < math.inf:
            raise UserError(f"{name} must be at least {minimum:g}, not {value:g}")


def check_positive(**values: float | None) -> None:
    """Raise UserError for a number that is not above 0; None is a default."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0, not {value:g}")


def check_pretrain(settings: Mapping[str, Any], config: str | Path | None) -> None:
    """Raise UserError for settings that a new run cannot have, data of which nothing is found, and a directory in use.

    A run to resume has its own settings, of which only some may change.
    """
    if _has_other_ranks():
        return
    from snclr.checkpoint.run_dir import RunDir, no_run_to_resume
    from snclr.train.config import require, resolve
    from snclr.train.load_run import config_for_resume

    if settings.get("resume"):
        if config is not None:
            return  # refused by training
        resumed = config_for_resume(dict(settings))
        if not resumed.data and not RunDir(resumed.out).config.is_file():
            raise no_run_to_resume(resumed.out)
        return
    resolved = resolve(settings, config)
    require(resolved, ("data", "out"))
    check_data(resolved.data)
    run = RunDir(resolved.out)
    if not run.lock.is_held():  # else training names the process that holds it
        run.check_free(resume=False, overwrite=resolved.overwrite)
    _check_local_images(resolved)


def _check_local_images(config: PretrainConfig) -> None:
    """Raise UserError if a folder or list has too few images for the batch size or K."""
    from snclr.data.datasets.base import open_dataset
    from snclr.data.sampler import steps_per_epoch
    from snclr.data.shards.open import is_shard_folder
    from snclr.train.config import fit_queue

    path = Path(config.data).expanduser()
    if path.is_file() or (path.is_dir() and not is_shard_folder(path)):
        images = len(open_dataset(config.data, split="train"))
        fit_queue(config, images)
        steps_per_epoch(images, config.batch_size)


def _has_other_ranks() -> bool:
    """Return whether a launcher, or `--devices`, started this process as one of several ranks."""
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return STARTED_BY in os.environ or any(size != "1" for size in sizes)
