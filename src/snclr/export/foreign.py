"""Weights of other software as the start of an encoder: what `--init-from` takes.

A run folder, a torchvision or timm weights file, or a checkpoint in the manner of MoCo v3. No file is trusted: nothing
in it is executed, and all of the encoder's weights must be there with the right shapes. Another architecture is
refused even where it holds every tensor that is needed: a ResNet-50 is not the first layers of a ResNet-101.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from snclr.encoders import EncoderSpec, state_on_meta
from snclr.errors import UserError
from snclr.export.encoder import load_encoder

# What wraps a state dict in a checkpoint.
_CONTAINERS = ("state_dict", "model", "model_state_dict")
# What stands before the encoder's keys: distributed and compiled modules, and names that methods give their encoder.
_WRAPPERS = ("module", "_orig_mod", "model", "encoder", "base_encoder", "encoder_q", "online_encoder", "backbone")
# What may be beside the encoder's own tensors: classifiers, heads, and a method's other parts.
_LEFT_OUT = (
    *("fc", "head", "heads", "head_dist", "classifier", "last_linear", "pre_logits"),
    *("projector", "projection_head", "predictor", "prediction_head"),
    *("momentum_encoder", "momentum_projector", "encoder_k", "target_encoder", "queue", "queue_ptr"),
)
_NEW_IN_TORCH_0_4 = "num_batches_tracked"  # files from before are still about; the count is used by nothing here


@dataclass(frozen=True)
class ForeignWeights:
    """An encoder's state dict from a file, and what is to be said about it."""

    state: dict[str, Tensor]
    report: str
    warnings: tuple[str, ...] = ()


def load_weights(path: str | Path, spec: EncoderSpec, say: Callable[[str], None] | None = None) -> dict[str, Tensor]:
    """Return the state dict of an encoder of ``spec`` from a run folder or a weights file, or raise a UserError.

    ``say`` is called with what was loaded, what was left out, and what the file could not tell.
    """
    weights = read_weights(path, spec)
    if say is not None:
        for line in (weights.report, *weights.warnings):
            say(line)
    return weights.state


def read_weights(path: str | Path, spec: EncoderSpec) -> ForeignWeights:
    """Return the weights in ``path`` for an encoder of ``spec``, with a report and warnings."""
    path = Path(path)
    if path.is_dir():
        encoder, saved = load_encoder(path)
        _check_heads(path, saved.heads, spec)
        tensors, told_heads = encoder.state_dict(), True
    elif path.is_file():
        tensors, description = _open_file(path)
        told_heads = description is not None
        if description is not None:
            _check_heads(path, description.get("heads"), spec)
    else:
        raise UserError(f"there is no {path}. Give a run folder, or a weights file (.pth, .pt or .safetensors).")
    expected = state_on_meta(spec)
    prefix = _find_prefix(tensors, expected, path, spec)
    state, left_out = _pick(tensors, prefix, expected, path, spec)
    doubts = []
    if spec.heads is not None and not told_heads:
        doubts.append(
            f"{path} does not say how many attention heads its weights were trained with, and any number fits their"
            f" shapes; {spec.heads} are used. MoCo v3's ViT-S has 12 where timm's has 6: set --heads if that is wrong."
        )
    return ForeignWeights(state, _report(path, len(state), prefix, left_out), tuple(doubts))


def _open_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors of a file by name and, where snclr wrote it, its description of the encoder."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
                own = json.loads((file.metadata() or {}).get("snclr", "null"))
        except (OSError, ValueError, RuntimeError, RecursionError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); it is damaged or not a .safetensors file") from error
        description = own.get("encoder") if isinstance(own, dict) else None
        return tensors, description if isinstance(description, dict) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about how the file was written
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\w[\w.]*)", str(error))
        what = f" ({named[1]})" if named else ""
        raise UserError(
            f"{path} is refused: it holds something other than tensors and plain values{what}, and reading that can run"
            " code from the file. If you trust it, open it elsewhere with torch.load(..., weights_only=False) and save"
            " its state dict alone, with safetensors or torch.save."
        ) from error
    except Exception as error:  # a damaged file makes torch raise almost anything
        if "TorchScript" in str(error):  # torch's own words advise to run it
            raise UserError(
                f"{path} is refused: it is a TorchScript program, and reading one can run its code. If you trust it,"
                " open it elsewhere with torch.jit.load and save its state dict alone, with safetensors or torch.save."
            ) from error
        raise UserError(f"{path} cannot be read ({_first_line(error)}); it is damaged or not a torch file") from error
    return _state_dict(content, path), None


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    """Return the tensors in what a file holds, out of a checkpoint's wrapping."""
    for _ in range(len(_CONTAINERS)):
        inner = next((name for name in _CONTAINERS if isinstance(content, dict) and name in content), None)
        if inner is None or not isinstance(content, dict) or not isinstance(content[inner], dict):
            break
        content = content[inner]
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a state dict")
    tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path} holds no tensors by name: it is neither a state dict nor a checkpoint with one")
    return tensors


def _find_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, spec: EncoderSpec) -> str:
    """Return what stands before the encoder's keys, e.g. "module.base_encoder."; the fullest match wins."""
    found: Counter[str] = Counter()
    for key in tensors:
        parts = key.split(".")
        for count in range(len(parts)):
            if count and parts[count - 1] not in _WRAPPERS:
                break
            if ".".join(parts[count:]) in expected:
                found[".".join(parts[:count]) + "." if count else ""] += 1
    if not found:
        raise UserError(
            f"{path} holds no weights of {spec.name}: {_some(expected)} are not in it. It has {_some(tensors)}."
        )
    # Equal matches: the outermost. Counter keeps the order of the file, which says nothing.
    return max(sorted(found, key=len), key=lambda prefix: found[prefix])


def _pick(
    tensors: Mapping[str, Tensor], prefix: str, expected: Mapping[str, Tensor], path: Path, spec: EncoderSpec
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the encoder's tensors in its order and dtypes, and the names of what was left out."""
    inside = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    missing = [key for key in expected if key not in inside and not key.endswith(_NEW_IN_TORCH_0_4)]
    if missing:
        raise _misfit(
            path, spec, f"{len(missing)} of its {len(expected)} tensors are missing, such as {_some(missing)}"
        )
    strange = [key for key in inside if key not in expected and key.split(".")[0] not in _LEFT_OUT]
    if strange:
        raise _misfit(path, spec, f"the file has {len(strange)} more, such as {_some(strange)}")
    shapes = [key for key in expected if key in inside and inside[key].shape != expected[key].shape]
    if shapes:
        words = [f"{key} {tuple(inside[key].shape)} instead of {tuple(expected[key].shape)}" for key in shapes[:3]]
        raise _misfit(path, spec, f"{len(shapes)} tensors have other shapes: {', '.join(words)}.{_hint(shapes, spec)}")
    state = {}
    for key, like in expected.items():
        value = inside.get(key, torch.zeros(like.shape, dtype=like.dtype)).detach()
        if value.layout != torch.strided or value.is_quantized or value.is_floating_point() != like.is_floating_point():
            raise _misfit(path, spec, f"{key} is {value.dtype}, {value.layout}")
        state[key] = value.to(like.dtype).clone(memory_format=torch.contiguous_format)
        if not bool(state[key].isfinite().all()):
            raise UserError(f"{path} cannot be a start: {key} has values that are not finite")
    return state, [key for key in tensors if not key.startswith(prefix) or key.removeprefix(prefix) not in expected]


def _hint(keys: list[str], spec: EncoderSpec) -> str:
    """Return what to do about shapes that differ for a known reason."""
    if spec.stem != "standard" and keys == ["conv1.weight"]:
        return f" The run has the low-resolution stem {spec.stem!r}; the file's is --stem standard."
    if keys[0] in ("pos_embed", "patch_embed.proj.weight"):
        return " The file is for another image size or patch size."
    return ""


def _misfit(path: Path, spec: EncoderSpec, reason: str) -> UserError:
    return UserError(f"the weights in {path} do not fit {spec.name}: {reason}")


def _check_heads(path: Path, heads: object, spec: EncoderSpec) -> None:
    """Raise a UserError for weights of another head count, which only the description of a run can show."""
    if heads != spec.heads:
        raise UserError(
            f"the weights in {path} were trained with {heads} attention heads and this run has {spec.heads}; the shapes"
            f" are the same, the features are not. Give --heads {heads}."
            if heads is not None and spec.heads is not None
            else f"the weights in {path} do not fit {spec.name}: only one of the two is a ViT"
        )


def _report(path: Path, count: int, prefix: str, left_out: list[str]) -> str:
    """Say in one line what was loaded and what was not."""
    where = f" (under {prefix.removesuffix('.')})" if prefix else ""
    parts = Counter(_group(key) for key in left_out)
    rest = ", ".join(f"{name} ({number})" for name, number in parts.items()) or "nothing"
    return f"initial weights: all {count} tensors of the encoder from {path}{where}; left out: {rest}"


def _group(key: str) -> str:
    """Return the part a left-out tensor belongs to: "module.base_encoder.fc.0.weight" is of base_encoder.fc."""
    parts = key.split(".")
    last = next((i for i, part in enumerate(parts) if part not in _WRAPPERS), 0)
    return ".".join(part for part in parts[: last + 1] if part != "module")


def _some(keys: Any) -> str:
    names = list(keys)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
