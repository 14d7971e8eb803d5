"""Weights of other libraries as the weights of an encoder (`snclr import`, `--init-from`).

Accepted are a run directory, a weights file of torchvision or timm, a checkpoint in the layout of MoCo v3, and
`pretrained` for the weights that the encoder's library publishes. No code from a file is run.
All weights of the encoder must be present with the right shapes, and a larger architecture is refused even if it
contains them: a ResNet-50 is not the first part of a ResNet-101.
"""

import pickle
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from snclr.checkpoint.encoder_file import load_encoder, read_weights_file, save_encoder
from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError, first_line, first_names
from snclr.models.encoders import EncoderSpec, build_encoder, resolve_encoder, state_on_meta
from snclr.runtime.results import Result

PRETRAINED = "pretrained"
"""Instead of a path: the weights that torchvision or timm publish for the encoder; ./pretrained is a file or folder."""
_CONTAINERS = ("state_dict", "model", "model_state_dict")
"""Keys of a checkpoint under which its state dict is stored."""
_PREFIX = r"(?:(?:module|_orig_mod|model|encoder|base_encoder|encoder_q|online_encoder|backbone)\.)*"
"""Prefixes of the encoder's keys: distributed and compiled modules, and names of the encoder in various methods."""
_IGNORED = (
    *("fc", "head", "heads", "head_dist", "classifier", "last_linear", "pre_logits"),
    *("projector", "projection_head", "predictor", "prediction_head"),
    *("momentum_encoder", "momentum_projector", "encoder_k", "target_encoder", "queue", "queue_ptr"),
)
"""Modules beside the encoder that are ignored: classifiers, heads and other parts of a method."""


@dataclass(frozen=True)
class ExternalWeights:
    """The state dict of an encoder, a summary of what was loaded, and warnings."""

    state: dict[str, Tensor]
    report: str
    warnings: tuple[str, ...] = ()


def read_weights(path: str | Path, spec: EncoderSpec) -> ExternalWeights:
    """Return the weights of a run directory, a file or `PRETRAINED` for an encoder of `spec`, or raise a UserError."""
    pretrained, path = str(path) == PRETRAINED, Path(path)
    description: object = None  # of the encoder, if snclr wrote the weights
    notes = []
    if pretrained:
        from snclr.models.pretrained import download_pretrained

        tensors, mean, std = download_pretrained(spec)
        description = spec.to_dict()
        if (mean, std) != (MEAN, STD):
            notes.append(
                f"the pretrained weights of {spec.name} were trained with mean {mean} and standard deviation {std}, "
                f"but images are normalized with {MEAN} and {STD}. Expect somewhat worse features."
            )
    elif path.is_dir():
        encoder, saved_spec = load_encoder(path)
        tensors, description = encoder.state_dict(), saved_spec.to_dict()
    elif path.suffix == ".safetensors" and path.is_file():
        tensors, metadata = read_weights_file(path)
        description = (metadata or {}).get("encoder")
    elif path.is_file():
        tensors = _torch_load(path)
    else:
        raise UserError(
            f"there is no {path}. Give a run directory, a weights file (.pth, .pt or .safetensors) or {PRETRAINED}."
        )
    if isinstance(description, dict):
        if description.get("heads") != spec.heads:
            raise _misfit(path, spec, f"they have {description.get('heads')} attention heads instead of {spec.heads}")
    elif spec.heads is not None:
        notes.append(
            f"{path} does not record the number of attention heads; {spec.heads} are used. The shapes fit any number:"
            " MoCo v3's ViT-S has 12 heads, timm's has 6. Set --heads if needed."
        )
    expected = state_on_meta(spec)
    prefix = _find_prefix(tensors, expected, path, spec)
    state, ignored = _select(tensors, prefix, expected, path, spec)
    return ExternalWeights(state, _report(path, len(state), prefix, ignored), tuple(notes))


@dataclass(frozen=True)
class ImportedEncoder(Result):
    """Result of `import_encoder`."""

    folder: str
    encoder: str
    report: str
    """What was loaded and what was ignored."""
    warnings: tuple[str, ...]


def import_encoder(
    weights: str | Path, folder: Path, *, name: str, image_size: int, stem: str, heads: int | None
) -> ImportedEncoder:
    """Write external weights as an encoder folder, which every command takes in place of a run directory."""
    spec = resolve_encoder(name, image_size=image_size, stem=stem, heads=heads)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give another --out")
    found = read_weights(weights, spec)
    encoder = build_encoder(spec)
    encoder.load_state_dict(found.state)
    save_encoder(encoder, spec, folder, extra={"weights": str(weights)})
    return ImportedEncoder(str(folder), spec.name, found.report, found.warnings)


def _torch_load(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file of torch.save, loaded without running code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the way the file was written
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        code = re.search(r"GLOBAL \w[\w.]*|TorchScript", str(error))
        if code or isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{path} is refused: it contains more than tensors ({code[0] if code else 'a pickle'}), and loading it"
                " can run code. If you trust it, load it yourself and save only its state dict."
            ) from error
        why = f" ({first_line(error)})" if zipfile.is_zipfile(path) else ": it is none, or an incomplete copy"
        raise UserError(
            f"cannot read {path} as a file of torch.save{why}. Give a file of weights (.pth, .pt or .safetensors)."
        ) from error
    for _ in _CONTAINERS:  # they may be nested, such as {"model": {"state_dict": …}}
        inner = [content[key] for key in _CONTAINERS if isinstance(content, dict) and key in content]
        content = next((value for value in inner if isinstance(value, dict)), content)
    items = content.items() if isinstance(content, dict) else ()
    tensors = {key: value for key, value in items if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path} contains no named tensors: it is neither a state dict nor a checkpoint with one")
    return tensors


def _find_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, spec: EncoderSpec) -> str:
    """Return the prefix of the encoder's keys, e.g. "module.base_encoder.": the one with most matching keys."""
    matches = Counter(
        prefix
        for key in tensors
        for name in expected
        if key.endswith(name) and re.fullmatch(_PREFIX, prefix := key.removesuffix(name))
    )
    if not matches:
        raise UserError(
            f"{path} has no weights of {spec.name}: {first_names(expected)} are missing. It has {first_names(tensors)}."
        )
    return max(sorted(matches, key=len), key=lambda prefix: matches[prefix])  # the shortest of equal ones


def _select(
    tensors: Mapping[str, Tensor], prefix: str, expected: Mapping[str, Tensor], path: Path, spec: EncoderSpec
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the encoder's tensors in its order and dtypes, and the keys that were ignored."""
    inside = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    # Files from before torch 0.4 have no num_batches_tracked.
    missing = [key for key in expected if key not in inside and not key.endswith("num_batches_tracked")]
    extra = [key for key in inside if key not in expected and key.split(".")[0] not in _IGNORED]
    shapes = [key for key in expected if key in inside and inside[key].shape != expected[key].shape]
    advice = ". Name the encoder that has these weights."
    if missing:
        number = f"{len(missing)} of {len(expected)}"
        raise _misfit(path, spec, f"missing tensors ({number}): {first_names(missing)}{advice}")
    if extra:
        raise _misfit(path, spec, f"additional tensors ({len(extra)}): {first_names(extra)}{advice}")
    if shapes:
        shown = [f"{key} {tuple(inside[key].shape)} instead of {tuple(expected[key].shape)}" for key in shapes]
        raise _misfit(path, spec, f"wrong shapes ({len(shapes)}): {first_names(shown)}.{_hint(shapes, spec)}")
    state = {}
    for key, like in expected.items():
        value = inside.get(key, torch.zeros(like.shape, dtype=like.dtype)).detach()
        if value.layout != torch.strided or value.is_quantized or value.is_floating_point() != like.is_floating_point():
            raise _misfit(path, spec, f"{key} is {value.dtype}, {value.layout}")
        state[key] = value.to(like.dtype).clone(memory_format=torch.contiguous_format)
        if not bool(state[key].isfinite().all()):
            raise UserError(f"{path} cannot be used: {key} has values that are not finite")
    return state, [key for key in tensors if not key.startswith(prefix) or key.removeprefix(prefix) not in expected]


def _hint(keys: list[str], spec: EncoderSpec) -> str:
    """Return advice for shapes that differ for a known reason."""
    if spec.stem != "standard" and keys == ["conv1.weight"]:
        return f" The run has the low-resolution stem {spec.stem!r}; the file needs --stem standard."
    if keys[0] in ("pos_embed", "patch_embed.proj.weight"):
        return " The file is for another image size or patch size."
    return ""


def _misfit(path: Path, spec: EncoderSpec, reason: str) -> UserError:
    return UserError(f"the weights in {path} do not fit {spec.name}: {reason}")


def _report(path: Path, count: int, prefix: str, ignored: list[str]) -> str:
    """Return one line about what was loaded and which modules were ignored, with their numbers of tensors."""
    where = f" (under {prefix.removesuffix('.')})" if prefix else ""
    # The module of "module.base_encoder.fc.0.weight" is base_encoder.fc.
    modules = Counter(match[1] for key in ignored if (match := re.match(rf"(?:module\.)?({_PREFIX}[^.]+)", key)))
    rest = ", ".join(f"{name} ({number})" for name, number in modules.items()) or "nothing"
    return f"all {count} tensors of the encoder from {path}{where}; ignored: {rest}"
