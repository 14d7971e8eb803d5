"""Files of other formats: encoders (`export`, `import_encoder`) and WebDataset shards (`pack`, `verify_shards`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snclr.api.early_checks import check_folder, check_run_and_data, check_weights
from snclr.exporters.format import Exported, check_names
from snclr.runtime.progress import set_torch_status

if TYPE_CHECKING:
    from snclr.checkpoint.external_weights import ImportedEncoder
    from snclr.data.shards.pack import PackResult, VerifyResult


def export(run: str | Path, to: str | Sequence[str], out: str | Path | None = None) -> list[Exported]:
    """Export the encoder of a run. Each export is loaded again and compared before it is kept.

    If some formats cannot be written, the others are, and ExportError states which failed and why.

    Args:
        run: Run directory, the --out of snclr pretrain.
        to: One or more of torchvision, timm, detectron2, mmdet, onnx and safetensors, separated by commas.
        out: Folder to write to, with one subfolder per format (default: RUN/export).
    """
    check_run_and_data(run)
    names = [name.strip() for name in (to.split(",") if isinstance(to, str) else to)]
    unique = list(dict.fromkeys(name for name in names if name))
    check_names(unique)
    check_folder(out)
    set_torch_status()
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
    check_weights(weights)
    check_folder(out)
    set_torch_status()
    from snclr.checkpoint.external_weights import import_encoder as write_folder

    return write_folder(weights, Path(out), name=encoder, image_size=image_size, stem=stem, heads=heads)


def pack(
    folder: str | Path,
    *,
    shards: str | Path,
    shard_size: str = "512MB",
    images_per_shard: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    check: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> PackResult:
    """Write a folder or list of images as tar shards with a manifest, without re-encoding the images.

    The output appears when it is complete. Calling it again resumes an interrupted pack.

    Args:
        folder: Folder of images, or a list file.
        shards: Output folder.
        shard_size: Approximate size of a shard.
        images_per_shard: Exactly N images per shard, ignoring --shard-size.
        seed: Seed of the shuffle over shards.
        shuffle: Distribute the images over the shards at random; otherwise keep the order of their names.
        check: Decode every image and leave out those that fail.
        workers: Number of shards written in parallel (default: one per CPU).
        overwrite: Replace the shards in the output folder.
        quiet: Print no progress.
    """
    from snclr.data.shards.pack import PackSettings, pack_folder
    from snclr.runtime.memory import parse_bytes

    shard_bytes = parse_bytes(shard_size, "--shard-size")
    settings = PackSettings(shard_bytes, images_per_shard, seed if shuffle else None, check)
    return pack_folder(folder, shards, settings, workers=workers, overwrite=overwrite, quiet=quiet)


def verify_shards(folder: str | Path, *, quiet: bool = False) -> VerifyResult:
    """Compare every packed shard with the size and hash in its manifest.

    Args:
        folder: A folder that `pack` wrote.
        quiet: Print no progress.
    """
    from snclr.data.shards.pack import verify_folder

    return verify_folder(folder, quiet=quiet)
