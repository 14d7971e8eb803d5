"""Checks of paths and numbers that need no torch, so that a typo is reported before the slow imports.

Training and evaluation check again. On several ranks only those later checks run: their errors end all ranks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.checkpoint.run_dir import RunDir, no_run_to_resume, open_run
from snclr.errors import UserError, similar_path
from snclr.io.atomic import check_file_name, check_writable
from snclr.runtime.machine import check_precision, has_gpu_driver
from snclr.runtime.progress import set_torch_status
from snclr.runtime.settings import Range
from snclr.runtime.stop import STARTED_BY
from snclr.train.config import fit_queue, read_config, require_paths, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from snclr.api.options import EncodingOptions
    from snclr.evaluation.session import Session


def check_run_and_data(
    run: str | Path, *data: str | Path | None, device: str | None = None, precision: str = "32"
) -> None:
    """Raise UserError if there is no run, device or precision of that name, or nothing for data that was given."""
    if not _has_other_ranks():
        open_run(run)
    check_data(*data)
    check_device(device, precision)


def checked_session(
    run: str | Path, *data: str | Path | None, **options: Unpack[EncodingOptions]
) -> AbstractContextManager[Session]:
    """Open the session of an evaluation after a check of the run and of the data that was given."""
    check_run_and_data(run, *data, device=options.get("device"), precision=options.get("precision", "32"))
    return _open_session(run, **options)


def _open_session(run: str | Path, **options: Unpack[EncodingOptions]) -> AbstractContextManager[Session]:
    set_torch_status()
    from snclr.evaluation.session import open_session

    return open_session(run, **options)


def labeled_session(
    run: str | Path, data: str | Path | None, test: str | Path | None, **options: Unpack[EncodingOptions]
) -> AbstractContextManager[Session]:
    """Open the session of an evaluation with labels, as `checked_session`, after a check of the labels.

    A folder with subfolders, shards and named datasets may be large or remote: their labels are checked later.
    """
    check_run_and_data(run, data, test, device=options.get("device"), precision=options.get("precision", "32"))
    if not _has_other_ranks():
        from snclr.data.datasets.base import open_dataset
        from snclr.data.datasets.folder import require_labels

        for spec, part in ((data or _training_data(run), "training"), (test, "test")):
            path = Path(spec or "").expanduser()
            has_subfolders = path.is_dir() and next(os.walk(path), ("", [], []))[1]
            if _is_folder_or_list(spec) and not has_subfolders:
                require_labels(open_dataset(str(spec), split="train"), part)
    return _open_session(run, **options)


def check_data(*data: str | Path | None) -> None:
    """Raise UserError if nothing is found for data that was given."""
    if not _has_other_ranks():
        from snclr.data.datasets.base import check_spec
        from snclr.data.datasets.huggingface import check_reachable, names_huggingface

        for spec in map(str, filter(None, data)):
            check_spec(spec)
            if names_huggingface(spec):
                check_reachable(spec)


def check_query(run: str | Path, image: str | Path, data: str | None = None, *, split: str | None = None) -> None:
    """Raise UserError if there is neither a readable file nor an image with that key in the folder or list.

    The default data are those of the run. Other datasets than folders and lists are searched later.
    """
    path = Path(image).expanduser()
    if _has_other_ranks() or path.is_dir():
        return
    from snclr.data.datasets.base import open_dataset
    from snclr.evaluation.retrieval.queries import load_query, open_queries

    if path.is_file():
        load_query(image, open_queries(image))
        return
    data = data or _training_data(run)
    if _is_folder_or_list(data):
        load_query(image, open_queries(image, open_dataset(str(data), split=split or "train")))


def check_numbers(allowed: Range, **values: float | None) -> None:
    """Raise UserError for a number that is not allowed; None is a default."""
    for name, value in values.items():
        if value is not None and value not in allowed:
            raise UserError(f"{name} must be {allowed}, not {value:g}")


def check_file(
    out: str | Path | None, *, suffixes: Sequence[str] = (), flag: str = "--out", overwrite: bool = True
) -> None:
    """Raise UserError if a file that was named for the output has another suffix, exists or cannot be written."""
    if out is None or _has_other_ranks():
        return
    path = check_file_name(out, suffixes, flag=flag)
    check_writable(path, f"choose another {flag}", overwrite=overwrite)


def check_folder(out: str | Path | None, *, flag: str = "--out") -> None:
    """Raise UserError if no file can be written to a folder that was named for the output."""
    if out is not None and not _has_other_ranks():
        path = Path(out)
        if path.is_file():
            raise UserError(f"{flag} {path} is a file; give the name of a folder")
        check_writable(path / "file" if path.is_dir() else path, f"choose another {flag}")


def check_device(device: str | None, precision: str = "32") -> None:
    """Raise UserError for a name that is no device, for one that this machine lacks, and for bf16 or 16 without a GPU.

    A GPU needs a device file on Linux. If there is one, or elsewhere, torch is asked later.
    """
    if device is not None and not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", device):
        hint = " (did you mean 'cuda'?)" if device.lower() in ("gpu", "nvidia", "cuda") else ""
        raise UserError(f"there is no device {device!r}{hint}; choose auto, cpu, cuda, cuda:1 … or mps")
    if has_gpu_driver() or "torch" in sys.modules or _has_other_ranks():
        return
    if device is not None and device.startswith(("cuda", "mps")):
        raise UserError(f"there is no device {device!r} on this machine; choose auto or cpu")
    check_precision("cpu", precision)


def check_pretrain(settings: Mapping[str, Any], config: str | Path | None) -> str:
    """Raise UserError for bad settings, for data that is not found, and for a run directory that is in use.

    If the run is resumed, check that it exists and that the given settings may change. Return a note about photographs
    of the folder that cannot be read, or "".
    """
    if _has_other_ranks():
        return ""
    from snclr.data.datasets.base import open_dataset
    from snclr.data.read_check import unread_photos
    from snclr.data.sampler import steps_per_epoch
    from snclr.models.names import check_name
    from snclr.train.load_run import config_for_resume

    if settings.get("resume"):
        if config is None:  # else training raises the error
            resumed = config_for_resume(dict(settings))
            if not resumed.data and not RunDir(resumed.out).config.is_file():
                raise no_run_to_resume(resumed.out)
        return ""
    resolved = resolve(settings, config)
    require_paths(resolved)
    check_data(resolved.data)
    run = RunDir(resolved.out)
    if run.lock.is_held():
        raise run.in_use()
    run.check_free(resume=False, overwrite=resolved.overwrite)
    check_name(resolved.encoder)
    check_weights(resolved.init_from)
    check_device(resolved.device, resolved.precision)
    check_folder(resolved.out)
    if _is_folder_or_list(resolved.data):  # enough images for the batch size and K?
        images = len(open_dataset(resolved.data, split="train"))
        fit_queue(resolved, images)
        steps_per_epoch(images, resolved.batch_size)
    return unread_photos(resolved.data)


def check_weights(weights: str | Path | None) -> None:
    """Raise UserError if there is no such file or folder with weights."""
    path = Path(weights or ".").expanduser()
    if weights != "pretrained" and not path.exists():
        raise UserError(
            f"there is no {path}{similar_path(path)}. Give a run directory, a weights file (.pth, .pt or .safetensors)"
            " or pretrained."
        )


def _training_data(run: str | Path) -> str | None:
    """Return the --data of a run, None for a folder of weights."""
    config = RunDir(run).config
    data = read_config(config).get("data") if config.is_file() else None
    return data if isinstance(data, str) else None


def _is_folder_or_list(data: str | Path | None) -> bool:
    """Return whether the data are a folder of images or a list."""
    from snclr.data.datasets.builtin import BUILTIN
    from snclr.data.shards.open import is_shard_folder

    if not data or str(data).lower() in ("demo", *BUILTIN):
        return False
    path = Path(data).expanduser()
    return path.is_file() or (path.is_dir() and not is_shard_folder(path))


def _has_other_ranks() -> bool:
    """Return whether this process is one of several ranks, started by a launcher or by `--devices`."""
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return STARTED_BY in os.environ or any(size != "1" for size in sizes)
