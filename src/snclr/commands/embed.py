"""`snclr embed`: the features of every image of a set, as a file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import Session, add_compute_flags, data_of, finish, run_encoder, session

if TYPE_CHECKING:
    from torch import nn

    from snclr.data.sources import Source
    from snclr.encoders import EncoderSpec
    from snclr.evaluate.embeddings import Embeddings

EXAMPLES = """examples:
  snclr embed runs/photos --data my-photos/ --out photos.parquet
  snclr embed runs/cifar --data cifar10 --split test --out test.npy --normalize

The ending of --out says the format:
  .npy       a float32 array (images, features); photos.keys.json beside it has the file names in order
  .npz       the arrays features, keys and labels, and metadata, in one file
  .parquet   the columns key, label and feature, and metadata; needs pip install 'snclr[parquet]'

Features are kept in RUN/evaluation/features too, so that the same command goes on where an interrupted one stopped.
"""


def embed(
    run: str | Path,
    *,
    out: str | Path,
    data: str | None = None,
    split: str = "train",
    normalize: bool = False,
    batch_size: int = 128,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    cache: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write the features of every readable image's centre crop; what was written, and the images left out.

    `normalize` scales each feature vector to length 1, so that a dot product is a cosine. A stop (Ctrl-C, SIGTERM)
    gives a dict with `complete` False and an `exit_code`; the same call goes on.
    """
    from snclr.data.sources import open_source
    from snclr.distributed import together
    from snclr.durable import check_writable
    from snclr.evaluate.embeddings import UNWRITABLE, check_out, keys_file, write_embeddings
    from snclr.evaluate.resume import Interrupted

    path = check_out(out)
    with session(device=device, devices=devices, nodes=nodes, cache=cache, quiet=quiet) as at:
        with together():
            if at.first:
                check_writable(path, UNWRITABLE)
        try:
            (encoder, spec), source = at.open(
                lambda: (run_encoder(run), open_source(data or data_of(run), split=split, download=True))
            )
            found = _compute(
                at, encoder, spec, source, run=run, split=split, normalize=normalize, batch_size=batch_size,
                workers=workers,
            )  # fmt: skip
        except Interrupted as error:
            return at.stopped("embed", error)
        with together():
            if at.first:
                write_embeddings(path, found)
    return {
        "file": str(path),
        "keys_file": str(keys_file(path)) if path.suffix.lower() == ".npy" else None,
        "images": len(found.keys),
        **found.metadata,
    }


def _compute(
    at: Session, encoder: nn.Module, spec: EncoderSpec, source: Source, *, run: str | Path, split: str,
    normalize: bool, batch_size: int, workers: int,
) -> Embeddings:  # fmt: skip
    """The features of a source with all that tells where they come from."""
    import torch.nn.functional as F

    from snclr import __version__
    from snclr.data.views import MEAN, STD
    from snclr.evaluate.embeddings import Embeddings
    from snclr.evaluate.neighbors import class_names
    from snclr.export.encoder import weights_digest

    weights = weights_digest(encoder.state_dict())
    found = at.features(run, encoder, source, image_size=spec.image_size, batch_size=batch_size, workers=workers)
    features = F.normalize(found.features, dim=1) if normalize else found.features
    metadata = {
        "snclr": __version__,
        "run": str(run),
        "encoder": spec.name,
        "features": features.shape[1],
        "weights_sha256": weights,
        "image_size": spec.image_size,
        "mean": list(MEAN),
        "std": list(STD),
        "view": "centre crop",
        "normalize": normalize,
        "data": source.name,
        "split": split,
        "fingerprint": source.fingerprint(),
        "skipped": [asdict(skip) for skip in found.skipped],
    }
    keys = [source.key(index) for index in found.ids.tolist()]
    return Embeddings(features.numpy(), keys, class_names(source, found.ids), metadata)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument("--data", help="images: a folder, a list, shards, a data set by name (default: the run's own)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write: .npy, .npz or .parquet")
    parser.add_argument("--normalize", action="store_true", help="scale each image's features to length 1")
    parser.add_argument("--split", default="train", help="which part, where the set has parts (train, test, all …)")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="images encoded at once")
    add_compute_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    done = embed(
        a.run, out=a.out, data=a.data, split=a.split, normalize=a.normalize, batch_size=a.batch_size, workers=a.workers,
        device=a.device, devices=a.devices, nodes=a.nodes, cache=not a.no_cache, quiet=a.json,
    )  # fmt: skip
    return finish(done, a, _show)


def _show(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(done))
        return
    names = f", names in {done['keys_file']}" if done["keys_file"] else ""
    length = "of length 1" if done["normalize"] else "as the encoder gives them"
    print(f"wrote {done['file']}: {done['images']:,} images × {done['features']} features, {length}{names}")
    if done["skipped"]:
        print(f"{len(done['skipped'])} images could not be read; all are listed under metadata, skipped:")
        for skip in done["skipped"][:5]:
            print(f"  {skip['key']}: {skip['reason']}")
