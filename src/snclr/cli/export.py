"""Print the results of `snclr export` and `snclr import`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from snclr.api.export import export, import_encoder
from snclr.cli.flags import Command
from snclr.errors import snclr_command
from snclr.exporters.format import Exported, ExportError

if TYPE_CHECKING:
    from snclr.checkpoint.external_weights import ImportedEncoder

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

_IMPORT_EXAMPLES = """Examples:
  snclr import pretrained --encoder resnet50 --out runs/imagenet
  snclr import resnet50.pth --encoder resnet50 --out runs/imagenet
  snclr import vit-s.pth.tar --encoder vit_small --heads 12 --out runs/vit
  snclr knn runs/imagenet --data labeled-photos/
  snclr explore runs/photos runs/imagenet         # compare with your run

The folder has an encoder but no training data, queue or projection heads, so commands that need images need --data.
To continue training from weights, use snclr pretrain --init-from.
"""


def show_import(imported: ImportedEncoder) -> None:
    """Print what was loaded and what to do next."""
    for text in imported.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(f"wrote {imported.folder}: {imported.encoder}; {imported.report}")
    print(f"evaluate it:  {snclr_command('knn', imported.folder, '--data', 'LABELED-IMAGES')}")


def export_all(*arguments: Any, **keywords: Any) -> tuple[list[Exported], dict[str, str]]:
    """Return the exports, and the reasons of those that failed by format; raise only if nothing was written."""
    try:
        return export(*arguments, **keywords), {}
    except ExportError as error:
        if not error.exports:
            raise
        return error.exports, error.failed


def show_export(outcome: tuple[list[Exported], dict[str, str]]) -> None:
    """Print each file with the code that loads it, then the failures."""
    exports, failed = outcome
    for item in exports:
        same = f"features equal up to rounding (difference at most {item.difference:.1e})"
        same = "features identical" if item.difference == 0 else same
        print(f"{item.format}: wrote {item.path}; loaded again, {same}\n")
        print("\n".join(f"    {line}".rstrip() for line in item.snippet.splitlines()) + "\n")
    for reason in failed.values():
        print(f"snclr export: {reason}", file=sys.stderr)


COMMANDS = {
    "export": Command(
        function=export,
        show=show_export,
        examples=_EXAMPLES,
        keywords=("to", "out"),
        run=export_all,
        exit_code=lambda outcome: 2 if outcome[1] else 0,
        to_json=lambda outcome: {"exports": [item.to_dict() for item in outcome[0]], "failed": outcome[1]},
    ),
    "import": Command(function=import_encoder, show=show_import, examples=_IMPORT_EXAMPLES),
}
