"""`snclr pack`: a folder of images as shards, with a manifest and hashes; and the check of such shards."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.data.shard_manifest import Manifest
    from snclr.data.sources import FileSource

EXAMPLES = """examples:
  snclr pack photos/ --shards photos-shards/
  snclr pretrain --data photos-shards/ --out runs/photos
  snclr pack imagenet/ --shards imagenet-shards/ --shard-size 1GB --workers 8 --check
  snclr pack --verify photos-shards/

The files' own bytes are stored, in tars that WebDataset reads too. A folder with train/ beside val/ or test/ gives the
same parts. A run on the shards is the run on the folder: images keep their ids, and with them their order and views.
Put the shards on a web server or an object store, and give the address of shards.json as --data.
OUT appears when all of it is complete; the same command again goes on where an interrupted one stopped.
"""


def pack(
    folder: str | Path,
    *,
    shards: str | Path,
    shard_size: str = "512MB",
    images_per_shard: int | None = None,
    seed: int | None = 0,
    check: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write a folder (or list) of images as shards; returns what was written, and the bad images left out by `check`.

    The images are spread over the shards at random by `seed`; None leaves them in the order of their names.
    """
    from snclr.data.cache import parse_bytes
    from snclr.data.shard_writer import PackSettings, pack_files
    from snclr.progress import Progress

    shard_bytes = parse_bytes(shard_size, "--shard-size")
    if images_per_shard is not None and images_per_shard < 1:
        raise UserError(f"--images-per-shard is {images_per_shard}; it must be at least 1")
    out = Path(shards).expanduser()
    _check_out(out, overwrite)
    parts = _parts(folder)
    settings = PackSettings(shard_bytes, images_per_shard, seed, check)
    with Progress(f"packing {folder}", sum(map(len, parts.values())), quiet=quiet) as progress:
        packed = pack_files(
            parts, out, settings, workers=workers or os.cpu_count() or 1, done=_one_at_a_time(progress.update)
        )
    found = {part or "all": _figures(one.manifest) for part, one in packed.items()}
    return {
        "shards": str(out),
        **{key: sum(figures[key] for figures in found.values()) for key in ("images", "files", "bytes")},
        "parts": found,
        "skipped": [
            {"key": f"{part}/{key}" if part else key, "reason": why}
            for part, one in packed.items()
            for key, why in one.bad
        ],
    }


def _figures(manifest: Manifest) -> dict[str, Any]:
    return {
        "images": len(manifest.index),
        "files": len(manifest.shards),
        "bytes": sum(entry.bytes for entry in manifest.shards),
        "classes": len(manifest.index.classes),
        "digest": manifest.digest(),
    }


def verify(folder: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Compare every packed shard below a folder with its manifest's size and hash; what was read, and what is wrong."""
    from snclr.data.shard_manifest import MANIFEST, read_manifest
    from snclr.data.shard_writer import verify_shards
    from snclr.progress import Progress

    top = Path(folder).expanduser()
    places = [top, *(top / part for part in ("train", "val", "test"))]
    places = [place for place in places if (place / MANIFEST).is_file()]
    if not places:
        raise UserError(f"there is no {MANIFEST} in {top}; give a folder that `snclr pack` wrote")
    manifests = [read_manifest(place / MANIFEST) for place in places]
    total = sum(entry.bytes for manifest in manifests for entry in manifest.shards)
    wrong: list[str] = []
    with Progress(f"verifying {top}", total, unit="bytes", quiet=quiet) as progress:
        for place in places:
            below = "" if place == top else f"{place.name}/"
            wrong += [below + fault for fault in verify_shards(place, progress.update)]
    shards = sum(len(manifest.shards) for manifest in manifests)
    images = sum(len(manifest.index) for manifest in manifests)
    return {"shards": str(top), "files": shards, "images": images, "bytes": total, "wrong": wrong}


def _check_out(out: Path, overwrite: bool) -> None:
    """A folder that is not empty is replaced only when asked, and only when it holds shards."""
    from snclr.data.shard_manifest import MANIFEST

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    packed = any((out / part / MANIFEST).is_file() for part in ("", "train", "val", "test"))
    if not packed:
        raise UserError(f"{out} exists and was not written by `snclr pack`; choose another place for --shards")
    if not overwrite:
        raise UserError(f"{out} holds shards already; choose another place, or replace them with --overwrite")


def _parts(folder: str | Path) -> dict[str, FileSource]:
    """The folder's parts by name, or the whole under an empty name."""
    from snclr.data.folder import split_folder
    from snclr.data.sources import FileSource, open_source

    top = Path(folder).expanduser()
    names = [""]
    if top.is_dir() and split_folder(top, "train") != top:
        names = [name for name in ("train", "val", "test") if (top / name).is_dir()]
    found = {}
    for name in names:
        source = open_source(top if top.exists() else folder, split=name or "all")
        if not isinstance(source, FileSource):
            raise UserError(f"{folder} is no folder or list of image files; only those can be packed")
        found[name] = source
    return found


def _one_at_a_time(update: Callable[[int], None]) -> Callable[[int], None]:
    lock = threading.Lock()

    def locked(images: int) -> None:
        with lock:
            update(images)

    return locked


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a folder of images, or a text list of them")
    parser.add_argument("--shards", metavar="OUT", help="the folder to write the shards to")
    parser.add_argument("--shard-size", default="512MB", metavar="SIZE", help="about how large a shard is")
    parser.add_argument("--images-per-shard", type=int, metavar="N", help="so many images a shard, of whatever size")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the shuffle over the shards")
    parser.add_argument("--no-shuffle", action="store_true", help="keep the images in the order of their names")
    parser.add_argument("--check", action="store_true", help="decode every image, and leave out those that fail")
    parser.add_argument("--workers", type=int, metavar="N", help="shards written at a time (default: one a processor)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards in OUT")
    parser.add_argument("--verify", metavar="OUT", help="check the hashes of shards that were packed before")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    if a.verify is not None:
        if a.folder is not None or a.shards is not None:
            raise UserError("--verify checks shards that exist: give it alone, without DIR and --shards")
        return _run_verify(a)
    if a.folder is None or a.shards is None:
        raise UserError("give a folder of images and --shards, the folder to write: snclr pack DIR --shards OUT")
    done = pack(
        a.folder, shards=a.shards, shard_size=a.shard_size, images_per_shard=a.images_per_shard,
        seed=None if a.no_shuffle else a.seed, check=a.check, workers=a.workers, overwrite=a.overwrite, quiet=a.json,
    )  # fmt: skip
    if a.json:
        print(json.dumps(done))
        return 0
    print(f"wrote {done['shards']}: {done['images']:,} images in {done['files']:,} shards, {done['bytes']:,} bytes")
    if done["skipped"]:
        print(f"{len(done['skipped'])} files are not readable as images and were left out:")
        for skip in done["skipped"][:5]:
            print(f"  {skip['key']}: {skip['reason']}")
    print(f"train on them:  snclr pretrain --data {done['shards']} --out RUN")
    return 0


def _run_verify(a: argparse.Namespace) -> int:
    done = verify(a.verify, quiet=a.json)
    if a.json:
        print(json.dumps(done))
    elif done["wrong"]:
        for fault in done["wrong"]:
            print(fault)
        print(f"{len(done['wrong'])} of {done['files']:,} shards are not as they were packed; pack or copy them again")
    else:
        print(f"{done['files']:,} shards with {done['images']:,} images are as they were packed (sha256)")
    return 1 if done["wrong"] else 0
