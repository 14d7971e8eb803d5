"""The encoder of a run in two files: `encoder.safetensors` with the library's own keys, and `config.json`.

timm (1.0.26 or newer) loads the run directory as `timm.create_model("local-dir:RUN", pretrained=True)`. It has no
ResNet with a low-resolution stem; `loading_snippet` returns code that loads any encoder without snclr.

Both files carry the description of the encoder, since two files cannot be replaced atomically. After a crash between
the two writes, the weights file decides; it also has its own hash.

A run may also keep snapshots, `encoders/step-0000000120.safetensors`: the weights alone at some of its steps.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from snclr.checkpoint.run_dir import RunDir
from snclr.data.transforms.crop import CENTER_CROP_MARGIN
from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError, snclr_command
from snclr.io.atomic import write_atomic
from snclr.io.hashing import weights_digest
from snclr.models.encoders import SMALL_IMAGE, EncoderSpec, build_encoder, state_on_meta
from snclr.models.vit import head_count

WEIGHTS_NAME = "encoder.safetensors"
CONFIG_NAME = "config.json"
SCHEMA = 1
_SNAPSHOT = re.compile(r"step-(\d{10})\.safetensors")

# Without a classifier, timm takes the weights of these for those of an older layout, renames their keys and fails.
_NEEDS_CLASSIFIER = ("swin", "davit", "nextvit")

_GIVE_A_RUN = "Give a run directory (--out of snclr pretrain)."
_MAX_CONFIG_BYTES = 4 * 2**20


def save_encoder(encoder: nn.Module, spec: EncoderSpec, folder: Path, *, extra: dict[str, Any] | None = None) -> None:
    """Write both files atomically, in float32. Equal weights and `extra` give equal bytes.

    `extra` (JSON values such as the epoch and the method) is for the reader; no code depends on it.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    _check_state(state, spec, "the encoder")
    if spec.heads is not None and head_count(encoder) != spec.heads:  # shapes do not depend on it
        raise UserError(f"{spec.name} has {head_count(encoder)} attention heads, but its description has {spec.heads}.")
    description = {
        "schema": SCHEMA,
        "encoder": spec.to_dict(),
        "weights_sha256": weights_digest(state),
        "mean": list(MEAN),
        "std": list(STD),
        "extra": extra or {},
    }
    # A single metadata key: safetensors writes several in random order.
    weights = safetensors.torch.save(state, {"snclr": json.dumps(description)})
    config = json.dumps(_timm_config(spec) | {"snclr": description}, indent=2) + "\n"
    write_atomic(folder / WEIGHTS_NAME, weights)
    write_atomic(folder / CONFIG_NAME, config)


def load_encoder(folder: Path | str) -> tuple[nn.Module, EncoderSpec]:
    """Return the encoder in `folder`, in eval mode, and its spec.

    No code from the files is run; missing, damaged or inconsistent files raise a UserError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. {_GIVE_A_RUN}")
    with _explain_unreadable(folder / CONFIG_NAME), open(folder / CONFIG_NAME, "rb") as file:
        config = json.loads(file.read(_MAX_CONFIG_BYTES))  # a larger file is not ours and does not parse
    in_config = _check_description(config.get("snclr") if isinstance(config, dict) else None, folder / CONFIG_NAME)
    state, metadata = read_weights_file(folder / WEIGHTS_NAME)
    description = _check_description(metadata, folder / WEIGHTS_NAME)
    spec = EncoderSpec.from_dict(description.get("encoder"))
    if any(in_config.get(key) != description.get(key) for key in ("encoder", "mean", "std")):
        raise UserError(f"{CONFIG_NAME} and {WEIGHTS_NAME} in {folder} describe different encoders. {_repair(folder)}")
    _check_state(state, spec, str(folder / WEIGHTS_NAME))
    if weights_digest(state) != description.get("weights_sha256"):
        raise UserError(f"{folder / WEIGHTS_NAME} is damaged: its sha256 does not match. {_repair(folder)}")
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(spec)
    encoder.load_state_dict(state, strict=True)
    return encoder.eval(), spec


def read_weights_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors of a .safetensors file and, if snclr wrote it, the description in its metadata."""
    with _explain_unreadable(path), safe_open(path, framework="pt", device="cpu") as file:
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        description = json.loads((file.metadata() or {}).get("snclr", "null"))
    return state, description if isinstance(description, dict) else None


@contextlib.contextmanager
def _explain_unreadable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file of an encoder inside the block into a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}. {_repair(path.parent, _GIVE_A_RUN)}") from None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: also too deeply nested JSON
        raise UserError(
            f"cannot read {path} ({error}). It is damaged or not a {path.suffix} file. {_repair(path.parent)}"
        ) from error


def _repair(folder: Path, otherwise: str = "Restore it from a copy.") -> str:
    """Return what to do about a missing or damaged file of an encoder: a run writes it again from a checkpoint."""
    if RunDir(folder).has_checkpoints():
        command = snclr_command("pretrain", "--resume", "--out", folder)
        return f"Finish the training, or write it again from the last checkpoint: {command}"
    return otherwise


def save_snapshot(run: RunDir, encoder: nn.Module, step: int, *, total_steps: int, keep: int) -> None:
    """Write a snapshot at the first call after each of `keep` evenly spaced steps; `keep` 0 writes none."""
    if keep == 0:
        return
    before = max((known for known in snapshots(run) if known < step), default=0)
    if step * keep // total_steps > before * keep // total_steps:
        state = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
        write_atomic(run.encoders / f"step-{step:010d}.safetensors", safetensors.torch.save(state))


def snapshots(run: RunDir) -> dict[int, Path]:
    """Return the snapshots of a run by step, oldest first."""
    found = ((_SNAPSHOT.fullmatch(path.name), path) for path in run.encoders.glob("*.safetensors"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def loading_snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python code that loads the weights in `folder` with timm or torchvision alone, and prepares an image."""
    if spec.library == "torchvision":
        lines = [f"encoder = torchvision.models.{spec.architecture}()", "encoder.fc = torch.nn.Identity()"]
    else:
        arguments = [repr(spec.architecture), "num_classes=0"]
        arguments += [f"{key}={value!r}" for key, value in spec.model_args.items()]
        separator = ",\n    " if sum(map(len, arguments)) > 40 else ", "
        lines = [f"encoder = timm.create_model({separator.join(arguments)})"]
    if spec.stem != "standard":
        width, stride = state_on_meta(spec)["conv1.weight"].shape[0], 1 if spec.stem == "small" else 2
        lines.append(f"encoder.conv1 = torch.nn.Conv2d(3, {width}, 3, stride={stride}, padding=1, bias=False)")
        lines.append("encoder.maxpool = torch.nn.Identity()")
    imports = [f"import {name}" for name in ("timm", "torch", "torchvision") if f" {name}." in " ".join(lines)]
    path = str(Path(folder) / WEIGHTS_NAME)
    lines += [f"encoder.load_state_dict(load_file({path!r}))", "encoder.eval()"]
    if timm_reads_folder(spec):
        address = f"local-dir:{folder}"
        lines.append(f"# or, with timm 1.0.26 or newer:\n# timm.create_model({address!r}, pretrained=True)")
    code = "\n".join([*imports, "from safetensors.torch import load_file", "", *lines])
    return f"{code}\n\n{preprocessing_snippet(spec)}"


def preprocessing_snippet(spec: EncoderSpec, *, numpy: bool = False) -> str:
    """Return Python code that turns a PIL image into the input of the encoder: `center_crop`, then mean and std."""
    size, array = spec.image_size, ".numpy()" if numpy else ""
    return f"""\
from PIL import Image, ImageOps
from torchvision.transforms import functional as F

def preprocess(image):  # PIL image to (1, 3, {size}, {size})
    image = ImageOps.exif_transpose(image).convert("RGB")
    short_side = {int(size * CENTER_CROP_MARGIN)} if min(image.size) > {size} else {size}
    image = F.resize(image, short_side, F.InterpolationMode.BICUBIC)
    image = F.to_tensor(F.center_crop(image, {size}))
    mean, std = {list(MEAN)}, {list(STD)}
    return F.normalize(image, mean, std)[None]{array}

# features = encoder(preprocess(Image.open("photo.jpg")))
"""


def timm_reads_folder(spec: EncoderSpec) -> bool:
    """Whether timm's `local-dir:` loads an encoder of this kind."""
    return spec.stem == "standard" and not spec.architecture.startswith(_NEEDS_CLASSIFIER)


def _timm_config(spec: EncoderSpec) -> dict[str, Any]:
    """Return the part of config.json that timm reads: model arguments and image preprocessing."""
    return {
        "architecture": spec.architecture,
        "num_classes": 0,
        "num_features": spec.num_features,
        "model_args": spec.model_args,
        "pretrained_cfg": {
            "input_size": [3, spec.image_size, spec.image_size],
            "fixed_input_size": "img_size" in spec.model_args,
            "interpolation": "bicubic",
            # No crop for small images; the usual resize and center crop (256 to 224) for larger ones.
            "crop_pct": 1.0 if spec.image_size <= SMALL_IMAGE else 0.875,
            "mean": list(MEAN),
            "std": list(STD),
            "num_classes": 0,
        },
    }


def _check_description(description: object, path: Path) -> dict[str, Any]:
    """Return the description of an encoder if it has the known schema; else raise a UserError."""
    if not isinstance(description, dict):
        raise UserError(f"{path} was not written by snclr: it has no description of the encoder.")
    if description.get("schema") != SCHEMA:
        raise UserError(
            f"{path} has schema {description.get('schema')!r}, but this version of snclr reads {SCHEMA}."
            " Use the version that wrote it."
        )
    return description


def _check_state(state: dict[str, Tensor], spec: EncoderSpec, source: str) -> None:
    """Raise a UserError unless keys, shapes and dtypes are those of an encoder of `spec`."""
    expected = {key: (tuple(value.shape), value.dtype) for key, value in state_on_meta(spec).items()}
    given = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    wrong = sorted(key for key in expected.keys() | given.keys() if expected.get(key) != given.get(key))
    if wrong:
        first = wrong[0]
        raise UserError(
            f"The weights of {source} do not fit {spec.name}: wrong tensors ({len(wrong)}), first {first} "
            f"({given.get(first, 'missing')}, expected {expected.get(first, 'none')})."
        )
