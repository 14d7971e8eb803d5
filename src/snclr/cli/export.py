"""Print the results of `snclr export`, `import` and `pack`."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from snclr.api.export import export, import_encoder, pack, verify_shards
from snclr.cli.flags import Command
from snclr.errors import UserError, count, snclr_command
from snclr.exporters.format import Exported, ExportError
from snclr.runtime.progress import print_wrapped
from snclr.runtime.stop import StopRequested

if TYPE_CHECKING:
    from snclr.checkpoint.external_weights import ImportedEncoder
    from snclr.data.shards.pack import PackResult, VerifyResult

_EXAMPLES = """Examples:
  snclr export runs/photos --to timm
  snclr export runs/r50 --to torchvision,detectron2,mmdet --out weights/
  snclr export runs/photos --to onnx   # needs pip install 'snclr[onnx]'

Formats:
  torchvision  a state dict (.pth) for torchvision's ResNets
  timm         a folder for timm.create_model("local-dir:...", pretrained=True)
  detectron2   a .pkl file for detectron2's ResNets
  mmdet        a checkpoint (.pth) for mmdet's ResNets
  onnx         one .onnx file, any batch size
  safetensors  encoder.safetensors and config.json, as in the run; any encoder

Each export is loaded by its library (those for detectron2 and mmdet by torchvision) and its features are compared with
those of the encoder before it is kept. The code that loads it is printed. If one format fails, the others are still
written, and the exit code is 2.
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
_PACK_EXAMPLES = """Examples:
  snclr pack photos/ --shards photos-shards/
  snclr pretrain --data photos-shards/ --out runs/photos
  snclr pack imagenet/ --shards imagenet-shards/ --shard-size 1GB --check
  snclr pack --verify photos-shards/

The image files are stored unchanged, in tar files that WebDataset can read. A folder with train/ and val/ or test/ is
packed split by split. Images keep their ids, so a run on the shards has the same order and views as a run on the
folder. To read the shards from a web server or an object store, give the URL of shards.json as --data. The output
appears when it is complete; the same command resumes an interrupted pack.
"""


def show_import(imported: ImportedEncoder) -> None:
    """Print what was loaded and what to do next."""
    for text in imported.warnings:
        print_wrapped(f"warning: {text}", sys.stderr)
    print_wrapped(f"wrote {imported.folder}: {imported.encoder}; {imported.report}")
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
        print(f"{item.format}: wrote {item.path}\n  loaded again, {same}\n")
        print("\n".join(f"    {line}".rstrip() for line in item.snippet.splitlines()) + "\n")
    for reason in failed.values():
        print_wrapped(f"snclr export: {reason}", sys.stderr)


def pack_or_verify(
    folder: str | None = None, *, shards: str | None = None, verify: str | None = None, **options: Any
) -> PackResult | VerifyResult:
    """Pack a folder, or verify packed shards."""
    if verify is not None:
        if folder is not None or shards is not None:
            raise UserError("--verify checks existing shards; give it without FOLDER and --shards")
        return verify_shards(verify, quiet=options["quiet"])
    if folder is None or shards is None:
        raise UserError("give a folder of images and the output folder: snclr pack FOLDER --shards OUT")
    try:
        return pack(folder, shards=shards, **options)
    except KeyboardInterrupt:  # the finished shards are in a hidden folder beside the output
        raise StopRequested(signal.SIGINT) from None


def show_pack(result: PackResult | VerifyResult) -> None:
    """Print what was written, or which shards are damaged."""
    from snclr.data.shards.pack import VerifyResult

    if isinstance(result, VerifyResult):
        print("\n".join(result.wrong), end="\n" if result.wrong else "")
        damaged = f"damaged: {len(result.wrong):,} of {count(result.files, 'shard')}; pack or copy again"
        intact = f"intact (sha256): {count(result.files, 'shard')} with {count(result.images, 'image')}"
        print(damaged if result.wrong else intact)
        return
    images, shards = count(result.images, "image"), count(result.files, "shard")
    print(f"wrote {result.shards}: {images} in {shards}, {result.bytes:,} bytes")
    if result.skipped:
        print(f"skipped {count(len(result.skipped), 'file')} that cannot be read as images:")
        for file in result.skipped[:5]:
            print(f"  {file.key}: {file.reason}")
    print(f"train on them:  {snclr_command('pretrain', '--data', result.shards, '--out', 'RUN')}")


_VERIFY = Parameter(metavar="PATH", help="verify the hashes of packed shards; nothing is packed")
COMMANDS = {
    "export": Command(
        export, show_export, _EXAMPLES, keywords=("to", "out"), run=export_all,
        exit_code=lambda outcome: 2 if outcome[1] else 0,
        to_json=lambda outcome: {"exports": [item.to_dict() for item in outcome[0]], "failed": outcome[1]},
    ),
    "import": Command(import_encoder, show_import, _IMPORT_EXAMPLES),
    "pack": Command(
        pack, show_pack, _PACK_EXAMPLES, run=pack_or_verify, optional=("folder", "shards"),
        extra={"verify": Annotated[str | None, _VERIFY]}, saved="finished shards are kept",
        exit_code=lambda result: 1 if getattr(result, "wrong", ()) else 0,
    ),
}  # fmt: skip
