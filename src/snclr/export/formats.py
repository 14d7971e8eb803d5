"""The formats an encoder can be exported to, and what they share: written aside, loaded back, compared, then named.

A file gets its name only after the target's own rules have loaded it and its features have been compared with the
encoder's. Whatever fails before that is deleted, and an earlier export stays as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from snclr.durable import discard, fsync_folder, partial_path
from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.export import (
    detectron2_format,
    mmdet_format,
    onnx_format,
    safetensors_format,
    timm_format,
    torchvision_format,
)


class Format(Protocol):
    """What the module of a format has."""

    FILE: str
    """The file in its folder; "" where the folder as a whole is what is loaded."""
    TOLERANCE: float
    """Largest difference of a feature allowed, as a share of the largest feature (or of 1)."""

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Say why an encoder cannot be written in this format; None if it can."""

    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Write the encoder into an empty folder."""

    def reload(self, spec: EncoderSpec, folder: Path) -> Callable[[Tensor], Tensor]:
        """Load it by the target's own rules: images (N, 3, S, S) to features (N, D)."""

    def snippet(self, spec: EncoderSpec, folder: Path) -> str:
        """Return the lines a person needs to load it."""


FORMATS: dict[str, Format] = {
    "torchvision": torchvision_format,
    "timm": timm_format,
    "detectron2": detectron2_format,
    "mmdet": mmdet_format,
    "onnx": onnx_format,
    "safetensors": safetensors_format,
}

BATCHES = (1, 3)
"""Numbers of images the features are compared for: one, and one that no trace was made with."""


@dataclass(frozen=True)
class Exported:
    """One export that was loaded back and compared."""

    format: str
    path: Path
    difference: float
    """The largest difference of a feature from the encoder's own."""
    snippet: str


def refuse_misfits(names: list[str], spec: EncoderSpec) -> None:
    """Raise a UserError if a format cannot hold the encoder, with the reason and the formats that can."""
    for name in names:
        if reason := FORMATS[name].refusal(spec):
            fit = [other for other, form in FORMATS.items() if other != name and form.refusal(spec) is None]
            raise UserError(
                f"{name} cannot hold this encoder: {reason}. Nothing was written. It fits {', '.join(fit)}."
            )


def export_format(name: str, encoder: nn.Module, spec: EncoderSpec, out: Path, extra: dict[str, Any]) -> Exported:
    """Write ``encoder`` to the folder ``out/name``, which exists afterwards only if its check has passed."""
    form = FORMATS[name]
    target = out / name
    out.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    partial.mkdir()
    try:
        try:
            form.write(encoder, spec, partial, extra)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise UserError(
                f"{name}: could not write to {out} ({_first_line(error)}). Nothing was left there."
            ) from error
        difference = _check(name, encoder, spec, partial)
        _refuse_strangers(target, {path.name for path in partial.iterdir()})
        _settle(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(name, target / form.FILE, difference, form.snippet(spec, target))


@torch.no_grad()
def _check(name: str, encoder: nn.Module, spec: EncoderSpec, folder: Path) -> float:
    """Load what was written and return the largest difference of its features; a UserError if it is too large."""
    form = FORMATS[name]
    try:
        with torch.random.fork_rng(devices=[]):
            loaded = form.reload(spec, folder)
            generator = torch.Generator().manual_seed(0)
            shape = (3, spec.image_size, spec.image_size)
            batches = [torch.randn(count, *shape, generator=generator) for count in BATCHES]
            pairs = [(encoder(images), loaded(images)) for images in batches]
    except Exception as error:  # whatever the target raises for a file it cannot read
        raise UserError(
            f"{name}: the file was written but could not be loaded back ({_first_line(error)}), so it was deleted."
        ) from error
    difference = max(_difference(ours, theirs) for ours, theirs in pairs)
    scale = max(1.0, *(float(ours.abs().max()) for ours, _ in pairs))
    if not difference <= form.TOLERANCE * scale:  # "not <=" so that NaN is a failure too
        raise UserError(
            f"{name}: the file was written and loaded back, but its features differ from the encoder's by"
            f" {difference:.2g} (at most {form.TOLERANCE * scale:.2g} is allowed), so it was deleted."
        )
    return difference


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


def _refuse_strangers(target: Path, names: set[str]) -> None:
    """Raise a UserError if something that no export wrote is in the way: it would be deleted."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is in the way and is not an earlier export; move it, or give another --out.")
    strangers = sorted({path.name for path in target.iterdir()} - names) if target.exists() else []
    if strangers:
        raise UserError(
            f"{target} holds files that no export wrote ({', '.join(strangers[:3])}); move them, or give another --out."
        )


def _settle(partial: Path, target: Path) -> None:
    """Give what is complete its name; an earlier export goes."""
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        discard(target)
    os.rename(partial, target)
    fsync_folder(target.parent)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
