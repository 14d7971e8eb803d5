"""ONNX: one file with graph and weights, for any batch size and the image size of the run."""

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snclr.data.transforms.views import MEAN, STD
from snclr.exporters.format import Format
from snclr.models.encoders import EncoderSpec, state_on_meta

OPSET = 18
_NEEDED = ("onnx", "onnxruntime", "onnxscript")
_LARGEST = 2**31 - 2**24  # a protocol buffer is limited to 2 GiB, including the graph


class ONNX(Format):
    """The ONNX format, compared in ONNX Runtime."""

    file = "encoder.onnx"
    takes = "array"
    tolerance = 1e-4  # ONNX Runtime sums in another order
    template = """\
import onnxruntime

session = onnxruntime.InferenceSession(
    {path!r},
    providers=['CPUExecutionProvider'],
)

def encoder(images):  # numpy float32 (N, 3, {spec.image_size}, {spec.image_size}) to (N, {spec.num_features})
    return session.run(["features"], {{"images": images}})[0]
"""

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Refuse if packages are missing or the weights are too large for one file."""
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            return f"{', '.join(missing)} is not installed; pip install 'snclr[onnx]'"
        size = sum(value.nbytes for value in state_on_meta(spec).values())
        if size > _LARGEST:
            return f"the weights of {spec.name} have {size:,} bytes, but one ONNX file holds less than 2 GiB"
        return None

    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Export the encoder with torch; the preprocessing of images is stored in the file's metadata."""
        import onnx

        path = str(folder / self.file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch's exporter about itself
            torch.onnx.export(
                encoder, (torch.zeros(2, 3, spec.image_size, spec.image_size),), path, opset_version=OPSET, dynamo=True,
                input_names=["images"], output_names=["features"], dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False, verbose=False,
            )  # fmt: skip
        model = onnx.load(path)
        description = {"encoder": spec.to_dict(), "mean": list(MEAN), "std": list(STD), "image_size": spec.image_size}
        onnx.helper.set_model_props(model, {"snclr": json.dumps(description)})
        onnx.save(model, path)

    def reload(self, spec: EncoderSpec, folder: Path) -> Callable[[Tensor], Tensor]:
        """Check the file with ONNX and open it in ONNX Runtime."""
        import onnx
        import onnxruntime  # type: ignore[import-untyped]

        path = str(folder / self.file)
        onnx.checker.check_model(path, full_check=True)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])
