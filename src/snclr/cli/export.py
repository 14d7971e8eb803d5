"""Print the result of `snclr export`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from snclr.api.export import export
from snclr.cli.flags import Command
from snclr.exporters.format import Exported, ExportError

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
code that loads it is printed. If one format fails, the others are still written, and the exit code is 2.
"""


@dataclass(frozen=True)
class ExportOutcome:
    """The written exports, and the reasons of those that failed by format."""

    exports: list[Exported]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """2 if a format failed."""
        return 2 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"exports": [item.to_dict() for item in self.exports], "failed": self.failed}


def export_all(*arguments: Any, **keywords: Any) -> ExportOutcome:
    """Export what can be exported; raise only if nothing can."""
    try:
        return ExportOutcome(export(*arguments, **keywords))
    except ExportError as error:
        if not error.exports:
            raise
        return ExportOutcome(error.exports, error.failed)


def show_export(outcome: ExportOutcome) -> None:
    """Print each file with the code that loads it, then the failures."""
    for item in outcome.exports:
        same = "features identical" if item.difference == 0 else f"features differ by at most {item.difference:.1e}"
        print(f"{item.format}: wrote {item.path}; loaded again, {same}\n")
        print("\n".join(f"    {line}".rstrip() for line in item.snippet.splitlines()) + "\n")
    for reason in outcome.failed.values():
        print(f"snclr export: {reason}", file=sys.stderr)


COMMANDS = {
    "export": Command(
        function=export,
        show=show_export,
        examples=_EXAMPLES,
        keywords=("to", "out"),
        run=export_all,
    )
}
