"""`snclr export`: a run's encoder in the formats of other software, each checked before it is called done."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snclr.export.formats import Exported

EXAMPLES = """examples:
  snclr export runs/photos --to timm
  snclr export runs/r50 --to torchvision,detectron2,mmdet --out weights/
  snclr export runs/photos --to onnx --json                     # needs: pip install 'snclr[onnx]'

formats:
  torchvision  a state dict (.pth) for torchvision's ResNets
  timm         a folder for timm.create_model("local-dir:...", pretrained=True)
  detectron2   a .pkl with detectron2's names, for its ResNets
  mmdet        a checkpoint (.pth) for mmdet's ResNets
  onnx         one .onnx file, any number of images
  safetensors  encoder.safetensors and config.json, as in the run; every encoder

Each is loaded back by its own rules, and its features are compared with the encoder's, before it is kept. The lines
that load it are printed.
"""


def export(run: str | Path, to: str | Sequence[str], out: str | Path | None = None) -> list[Exported]:
    """Write the encoder of ``run`` in the formats ``to``, each to a folder of its name in ``out`` (RUN/export).

    All formats are checked to fit the encoder before the first is written.
    """
    from snclr.export.encoder import CONFIG_NAME, load_encoder
    from snclr.export.formats import export_format, refuse_misfits

    names = _format_names(to)
    run = Path(run)
    encoder, spec = load_encoder(run)
    refuse_misfits(names, spec)
    extra = json.loads((run / CONFIG_NAME).read_bytes())["snclr"].get("extra")
    folder = run / "export" if out is None else Path(out)
    return [export_format(name, encoder, spec, folder, extra if isinstance(extra, dict) else {}) for name in names]


def _format_names(to: str | Sequence[str]) -> list[str]:
    """Return the formats that are meant, each once."""
    from snclr.errors import UserError
    from snclr.export.formats import FORMATS

    parts = to.split(",") if isinstance(to, str) else list(to)
    names = list(dict.fromkeys(str(part).strip() for part in parts if str(part).strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        given = f"there is no format {unknown[0]!r}" if unknown else "no format was given"
        raise UserError(f"{given}; choose from {', '.join(FORMATS)}, several with commas between them")
    return names


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument(
        "--to", required=True, metavar="FORMATS", help="one or more of the formats below, with commas between them"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write, a folder for each format (default: RUN/export)")
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    done = export(a.run, a.to, a.out)
    if a.json:
        print(json.dumps({"exports": [{**asdict(item), "path": str(item.path)} for item in done]}))
        return 0
    for item in done:
        print(f"{item.format}: wrote {item.path}; loaded back, features differ by at most {item.difference:.1e}\n")
        print("\n".join(f"    {line}".rstrip() for line in item.snippet.splitlines()) + "\n")
    return 0
