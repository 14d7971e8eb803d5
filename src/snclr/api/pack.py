"""`snclr.pack` and `snclr.verify_shards`: write and verify WebDataset shards of an image folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snclr.data.shards.pack import PackResult, VerifyResult


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
