"""`snclr.export` and `snclr.import_encoder`: encoders to and from other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snclr.api.early_checks import check_folder, check_run_and_data
from snclr.errors import UserError, similar_path
from snclr.exporters.format import Exported, check_names

if TYPE_CHECKING:
    from snclr.checkpoint.external_weights import ImportedEncoder


def export(run: str | Path, to: str | Sequence[str], out: str | Path | None = None) -> list[Exported]:
    """Export the encoder of a run. Each export is loaded by its library and compared before it is kept.

    If some formats cannot be written, the others are, and ExportError states which failed and why.

    Args:
        run: Run directory, the --out of snclr pretrain.
        to: One or more of torchvision, timm, detectron2, mmdet, onnx and safetensors, separated by commas.
        out: Folder to write to, with one sub-folder per format (default: RUN/export).
    """
    check_run_and_data(run)
    names = [name.strip() for name in (to.split(",") if isinstance(to, str) else to)]
    unique = list(dict.fromkeys(name for name in names if name))
    check_names(unique)
    check_folder(out)
    from snclr.exporters.export import export_run

    return export_run(Path(run), unique, None if out is None else Path(out))


def import_encoder(
    weights: str | Path,
    *,
    encoder: str,
    out: str | Path,
    image_size: int = 224,
    stem: str = "standard",
    heads: int | None = None,
) -> ImportedEncoder:
    """Write weights of another library as a folder that `knn`, `neighbors`, `explore` and others take like a run.

    All tensors of the encoder must be present with the right shapes; classifiers and heads are ignored. No code in
    the file is executed.

    Args:
        weights: Weights file of torchvision, timm or MoCo v3 (.pth, .pt, .safetensors), or `pretrained`: the weights
            that the encoder's library publishes (downloaded).
        encoder: Architecture of the weights; `snclr encoders` lists them.
        out: Folder to write: a new or an empty one.
        image_size: Side of the images in pixels.
        stem: First layers of a ResNet: auto, standard, small or half.
        heads: Attention heads of a ViT (default: the library's).
    """
    path = Path(weights).expanduser()
    if str(weights) != "pretrained" and not path.exists():
        raise UserError(
            f"there is no {path}{similar_path(path)}. Give a run directory, a weights file (.pth, .pt or .safetensors)"
            " or pretrained."
        )
    check_folder(out)
    from snclr.checkpoint.external_weights import import_encoder as write_folder

    return write_folder(weights, Path(out), name=encoder, image_size=image_size, stem=stem, heads=heads)
