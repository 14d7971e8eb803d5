"""ONNX: one file with the graph and the weights, for any number of images of the size the encoder was trained at."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snclr.data.views import MEAN, STD
from snclr.encoders import EncoderSpec, state_on_meta
from snclr.errors import UserError

FILE: str = "encoder.onnx"
TOLERANCE: float = 1e-4  # other kernels add in another order

OPSET = 18
_NEEDED = ("onnx", "onnxruntime", "onnxscript")
_LARGEST = 2**31 - 2**24  # a protocol buffer holds less than 2 GiB, and the graph needs a little of it


def refusal(spec: EncoderSpec) -> str | None:
    """Say what is missing for ONNX, or None."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed; pip install 'snclr[onnx]'"
    size = sum(value.numel() * value.element_size() for value in state_on_meta(spec).values())
    if size > _LARGEST:
        return f"the weights of {spec.name} have {size:,} bytes, and one ONNX file holds less than 2 GiB"
    return None


def write(encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
    """Trace the encoder with torch's exporter; how images are prepared travels in the file's metadata."""
    import onnx

    images = torch.zeros(2, 3, spec.image_size, spec.image_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its own parts
        torch.onnx.export(
            encoder,
            (images,),
            str(folder / FILE),
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    model = onnx.load(str(folder / FILE))
    facts = {"encoder": spec.to_dict(), "mean": list(MEAN), "std": list(STD), "image_size": spec.image_size}
    onnx.helper.set_model_props(model, {"snclr": json.dumps(facts)})
    onnx.save(model, str(folder / FILE))


def reload(spec: EncoderSpec, folder: Path) -> Callable[[Tensor], Tensor]:
    """Check the file by ONNX's own rules and open it in ONNX Runtime."""
    import onnx

    onnx.checker.check_model(str(folder / FILE), full_check=True)
    opset = {entry.domain: entry.version for entry in onnx.load(str(folder / FILE)).opset_import}.get("")
    if opset != OPSET:
        raise UserError(f"the file has opset {opset}, not {OPSET}")
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])


def snippet(spec: EncoderSpec, folder: Path) -> str:
    """Return Python lines that make `encoder`, from numpy to numpy, with ONNX Runtime alone."""
    size = spec.image_size
    return (
        f"import onnxruntime  # the file has opset {OPSET}\n"
        "\n"
        f"session = onnxruntime.InferenceSession({str(folder / FILE)!r}, providers=['CPUExecutionProvider'])\n"
        "\n"
        f"def encoder(images):  # numpy float32 (N, 3, {size}, {size}) to (N, {spec.num_features})\n"
        '    return session.run(["features"], {"images": images})[0]\n'
    )
