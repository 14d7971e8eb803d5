"""The encoder of a run as two files: ``encoder.safetensors`` (the library's own keys) and ``config.json``.

timm reads the folder as it is: ``timm.create_model("local-dir:RUN", pretrained=True)`` (1.0.26 or newer) takes the
architecture and its arguments from config.json and the weights from the one .safetensors file there. A ResNet with a
low-resolution stem is not an architecture timm knows; `loading_snippet` has the two lines more it needs, and says for
every encoder what loads it.

The description is in both files: two files cannot be replaced in one step, so after a crash between them the weights
file, which also carries its own hash, is the one that counts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from snclr.data.views import MEAN, STD
from snclr.durable import write_atomic
from snclr.encoders import SMALL_IMAGE, EncoderSpec, build_encoder, output_width, state_on_meta
from snclr.errors import UserError
from snclr.train.tensor_file import safetensors_header, safetensors_pieces
from snclr.vits import head_count

WEIGHTS_NAME = "encoder.safetensors"
CONFIG_NAME = "config.json"
SCHEMA = 1

# timm takes weights of these without a classifier for files of an older layout and renames them, which then fails.
_NEEDS_CLASSIFIER = ("swin", "davit", "nextvit")

# A config.json of ours has a few kilobytes; more is not ours, and need not be read to know it.
_CONFIG_LIMIT = 4 * 2**20


def save_encoder(encoder: nn.Module, spec: EncoderSpec, folder: Path, *, extra: dict[str, Any] | None = None) -> None:
    """Write ``encoder`` to ``folder``, in float32; a crash at any moment leaves the old files or the new ones.

    ``extra`` (JSON values: epoch, method …) is kept for people and read by nothing.
    """
    state = {key: _plain(value) for key, value in encoder.state_dict().items()}
    _check_state(state, spec, "the encoder")
    _check_heads(encoder, spec)
    description = {
        "schema": SCHEMA,
        "encoder": spec.to_dict(),
        "weights_sha256": weights_digest(state),
        "mean": list(MEAN),
        "std": list(STD),
        "extra": extra or {},
    }
    # Our own writer: the library puts metadata in a random order, and equal runs should give equal files.
    header, order = safetensors_header(state, {"snclr": json.dumps(description)})
    weights = b"".join(safetensors_pieces(header, order, state))
    config = json.dumps(_timm_config(spec) | {"snclr": description}, indent=2) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS_NAME, weights)
    write_atomic(folder / CONFIG_NAME, config)


def load_encoder(folder: Path) -> tuple[nn.Module, EncoderSpec]:
    """Return the encoder saved in ``folder``, in eval mode, and its spec.

    Nothing in the files is trusted or executed; whatever is missing, damaged or does not fit raises a UserError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder of a run, the --out of snclr pretrain.")
    described = _read_config(folder / CONFIG_NAME)
    state, description = _read_weights(folder / WEIGHTS_NAME)
    spec = EncoderSpec.from_dict(description.get("encoder"))
    if any(described.get(key) != description.get(key) for key in ("encoder", "mean", "std")):
        raise UserError(
            f"{CONFIG_NAME} and {WEIGHTS_NAME} in {folder} describe different encoders; export the run again."
        )
    _check_state(state, spec, str(folder / WEIGHTS_NAME))
    if weights_digest(state) != description.get("weights_sha256"):
        raise UserError(
            f"{folder / WEIGHTS_NAME} is damaged: its weights do not match their hash. Export the run again."
        )
    if output_width(spec) != spec.num_features:
        raise UserError(
            f"{folder} describes an encoder of {spec.num_features} features that {spec.name} does not have."
        )
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(spec)
    _check_heads(encoder, spec)
    encoder.load_state_dict(state, strict=True)
    return encoder.eval(), spec


def loading_snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python lines that load the weights in ``folder`` into ``encoder`` with timm or torchvision alone."""
    if spec.library == "torchvision":
        lines = [f"encoder = torchvision.models.{spec.architecture}()", "encoder.fc = torch.nn.Identity()"]
    else:
        arguments = "".join(f", {key}={value!r}" for key, value in spec.model_args.items())
        lines = [f"encoder = timm.create_model({spec.architecture!r}, num_classes=0{arguments})"]
    if spec.stem != "standard":
        width, stride = state_on_meta(spec)["conv1.weight"].shape[0], 1 if spec.stem == "small" else 2
        lines.append(f"encoder.conv1 = torch.nn.Conv2d(3, {width}, 3, stride={stride}, padding=1, bias=False)")
        lines.append("encoder.maxpool = torch.nn.Identity()")
    imports = [
        f"import {name}" for name in ("timm", "torch", "torchvision") if any(f"{name}." in line for line in lines)
    ]
    path = str(Path(folder) / WEIGHTS_NAME)
    lines += [f"encoder.load_state_dict(load_file({path!r}), strict=True)", "encoder.eval()"]
    if timm_reads_folder(spec):
        address = f"local-dir:{folder}"
        lines.append(f"# or, with timm 1.0.26 or newer: timm.create_model({address!r}, pretrained=True)")
    return "\n".join([*imports, "from safetensors.torch import load_file", "", *lines]) + "\n"


def timm_reads_folder(spec: EncoderSpec) -> bool:
    """Tell whether timm's ``local-dir:`` loads a saved encoder of this kind without more."""
    return spec.stem == "standard" and not spec.architecture.startswith(_NEEDS_CLASSIFIER)


def weights_digest(state: dict[str, Tensor]) -> str:
    """Return the sha256 (hex) of names, dtypes, shapes and values, whatever the order or the file they are in.

    >>> a, b = torch.zeros(2), torch.ones(1)
    >>> weights_digest({"a": a, "b": b}) == weights_digest({"b": b, "a": a})
    True
    """
    digest = hashlib.sha256()
    for key in sorted(state):
        value = state[key].detach().to("cpu").contiguous()
        digest.update(json.dumps([key, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain(value: Tensor) -> Tensor:
    """Return ``value`` as files have it: on the CPU, contiguous, floats in float32 whatever the run's precision."""
    value = value.detach().to("cpu")
    return (value.float() if value.is_floating_point() else value).contiguous()


def _timm_config(spec: EncoderSpec) -> dict[str, Any]:
    """Return what timm reads of config.json: how to build the model, and how its images are prepared."""
    return {
        "architecture": spec.architecture,
        "num_classes": 0,
        "num_features": spec.num_features,
        "model_args": spec.model_args,
        "pretrained_cfg": {
            "input_size": [3, spec.image_size, spec.image_size],
            "fixed_input_size": "img_size" in spec.model_args,
            "interpolation": "bicubic",
            # Small images are used whole; larger ones by the usual resize and central crop (256 to 224).
            "crop_pct": 1.0 if spec.image_size <= SMALL_IMAGE else 0.875,
            "mean": list(MEAN),
            "std": list(STD),
            "num_classes": 0,
        },
    }


def _read_config(path: Path) -> dict[str, Any]:
    """Return our part of config.json, or raise a UserError."""
    try:
        if path.stat().st_size > _CONFIG_LIMIT:
            raise UserError(f"{path} is too large to be the {CONFIG_NAME} of a run.")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} holds no encoder: there is no {CONFIG_NAME}. Give the folder of a run."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    return _description(content.get("snclr") if isinstance(content, dict) else None, path)


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a weights file and the description it carries, or raise a UserError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
        content = json.loads(metadata.get("snclr", "null"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} holds no encoder: there is no {WEIGHTS_NAME}. Give the folder of a run."
        ) from None
    except (OSError, ValueError, RuntimeError, RecursionError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return state, _description(content, path)


def _description(content: object, path: Path) -> dict[str, Any]:
    """Return ``content`` if it is a description of this version, else raise a UserError."""
    if not isinstance(content, dict) or "schema" not in content:
        raise UserError(f"{path} was not written by snclr: it carries no description of the encoder.")
    if content["schema"] != SCHEMA:
        raise UserError(
            f"{path} has format {content['schema']!r}; this version reads {SCHEMA}. Install the snclr that wrote it."
        )
    return content


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read ({error}). It is damaged or not from a run; export the run again.")


def _check_state(state: dict[str, Tensor], spec: EncoderSpec, where: str) -> None:
    """Raise a UserError unless the tensors are exactly those an encoder of ``spec`` has."""
    expected = {key: (tuple(value.shape), value.dtype) for key, value in state_on_meta(spec).items()}
    given = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    wrong = sorted(key for key in expected.keys() | given.keys() if expected.get(key) != given.get(key))
    if wrong:
        first = wrong[0]
        raise UserError(
            f"The weights of {where} do not fit {spec.name}: {len(wrong)} tensors differ, such as {first} "
            f"({given.get(first, 'missing')}, expected {expected.get(first, 'none')})."
        )


def _check_heads(encoder: nn.Module, spec: EncoderSpec) -> None:
    """Raise a UserError for another head count than the spec's: shapes are equal, so nothing else would show it."""
    if spec.heads is not None and head_count(encoder) != spec.heads:
        raise UserError(f"{spec.name} has {head_count(encoder)} attention heads, its description says {spec.heads}.")
