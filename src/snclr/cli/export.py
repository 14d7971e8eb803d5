"""Print the result of `snclr export`."""

from __future__ import annotations

from snclr.api.export import export
from snclr.cli.flags import Command
from snclr.exporters.format import Exported

_EXAMPLES = """Examples:
  snclr export runs/photos --to timm
  snclr export runs/r50 --to torchvision,detectron2,mmdet --out weights/
  snclr export runs/photos --to onnx --json                     # needs: pip install 'snclr[onnx]'

Formats:
  torchvision  a state dict (.pth) for torchvision's ResNets
  timm         a folder for timm.create_model("local-dir:...", pretrained=True)
  detectron2   a .pkl file for detectron2's ResNets
  mmdet        a checkpoint (.pth) for mmdet's ResNets
  onnx         one .onnx file, any batch size
  safetensors  encoder.safetensors and config.json, as in the run; any encoder

Each export is loaded by its library and its features are compared with those of the encoder before it is kept. The
code that loads it is printed.
"""


def show_export(exports: list[Exported]) -> None:
    """Print each file with the code that loads it."""
    for item in exports:
        same = "features identical" if item.difference == 0 else f"features differ by at most {item.difference:.1e}"
        print(f"{item.format}: wrote {item.path}; loaded again, {same}\n")
        print("\n".join(f"    {line}".rstrip() for line in item.snippet.splitlines()) + "\n")


COMMANDS = {
    "export": Command(
        function=export,
        show=show_export,
        examples=_EXAMPLES,
        keywords=("to", "out"),
        to_json=lambda exports: {"exports": [item.to_dict() for item in exports]},
    )
}
