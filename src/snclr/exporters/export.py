"""Export an encoder: write it to a hidden folder, load it again, compare features, then rename.

An export that cannot be loaded or gives other features is deleted; an earlier export then stays unchanged.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snclr.checkpoint.encoder_file import CONFIG_NAME, load_encoder
from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError, first_line
from snclr.exporters.format import NAMES, Exported, ExportError, Format
from snclr.exporters.to_folder import Safetensors, Timm
from snclr.exporters.to_onnx import ONNX
from snclr.exporters.to_resnets import Detectron2, MMDet, Torchvision
from snclr.io.atomic import discard, fsync_path, partial_path
from snclr.models.encoders import EncoderSpec
from snclr.runtime.progress import set_status

FORMATS: dict[str, Format] = dict(
    zip(NAMES, (Torchvision(), Timm(), Detectron2(), MMDet(), ONNX(), Safetensors()), strict=True)
)

BATCH_SIZES = (1, 3)
"""Batch sizes of the comparison: none of them is the one that ONNX is traced with."""


def export_run(run: Path, names: list[str], out: Path | None) -> list[Exported]:
    """Write the encoder of `run` in each format; raise ExportError if some could not be written."""
    encoder, spec = load_encoder(run)
    extra = json.loads((run / CONFIG_NAME).read_bytes())["snclr"].get("extra")
    folder = RunDir(run).export if out is None else out
    exports: list[Exported] = []
    failed: dict[str, str] = {}
    for name in names:
        try:
            check_supported(name, spec)
            exports.append(_export(name, encoder, spec, folder, extra if isinstance(extra, dict) else {}))
        except UserError as error:
            failed[name] = str(error).rstrip(".") + "."
    if failed:
        raise ExportError(failed, exports)
    return exports


def check_supported(name: str, spec: EncoderSpec) -> None:
    """Raise a UserError if a format does not support the encoder, with the reason and the formats that do."""
    if reason := FORMATS[name].refusal(spec):
        others = [other for other, target in FORMATS.items() if other != name and target.refusal(spec) is None]
        raise UserError(f"cannot export to {name}: {reason}. Supported formats: {', '.join(others)}.")


def _export(name: str, encoder: nn.Module, spec: EncoderSpec, out: Path, extra: dict[str, Any]) -> Exported:
    """Write `encoder` to the folder `out`/`name`."""
    target, destination = FORMATS[name], out / name
    out.mkdir(parents=True, exist_ok=True)
    partial = partial_path(destination)
    partial.mkdir()
    try:
        set_status(f"writing {name}")
        try:
            target.write(encoder, spec, partial, extra)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise UserError(f"{name}: could not write to {out} ({first_line(error)})") from error
        set_status(f"comparing {name} with the encoder")
        difference = _compare(name, encoder, spec, partial)
        for path in partial.iterdir():
            fsync_path(path)
        names = {path.name for path in partial.iterdir()}
        if os.path.lexists(destination):
            if not destination.is_dir() or any(path.name not in names for path in destination.iterdir()):
                raise UserError(f"{destination} is not an earlier export. Move it, or give another --out.")
            discard(destination)
        os.rename(partial, destination)
        fsync_path(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(name, destination / target.file, difference, target.snippet(spec, destination))


@torch.no_grad()
def _compare(name: str, encoder: nn.Module, spec: EncoderSpec, folder: Path) -> float:
    """Load the export and return the largest difference of its features; raise a UserError if it is too large."""
    shape = (3, spec.image_size, spec.image_size)
    try:
        with torch.random.fork_rng(devices=[]):
            loaded = FORMATS[name].reload(spec, folder)
            torch.manual_seed(0)
            batches = [torch.randn(size, *shape) for size in BATCH_SIZES]
            pairs = [(encoder(images), loaded(images)) for images in batches]
    except Exception as error:  # any error of the target library
        raise UserError(f"{name}: the export was deleted, it could not be loaded ({first_line(error)})") from error
    difference = max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs)
    limit = FORMATS[name].tolerance * max(1.0, *(float(features.abs().max()) for features, _ in pairs))
    if not difference <= limit:  # "not <=" is also true for NaN
        excess = f"its features differ by {difference:.2g} (at most {limit:.2g} is allowed)"
        raise UserError(f"{name}: the export was deleted, {excess}")
    return difference
