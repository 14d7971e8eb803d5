"""Features kept on disk, block by block: an interrupted extraction goes on, and the next evaluation has them already.

    RUN/evaluation/features/ROLE-KEY/info.json                   what they are features of
                                     block-000012.safetensors    features, ids; metadata: skipped, stamp, sha256

The key is a hash of the weights, the images' fingerprint, the view and the kind of device. A block is used only while
its images are the same to the byte (arrays) or to size and time of change (files). Deleting the folder is always safe.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.loader import Skip
from snclr.data.order import Ids
from snclr.data.sources import ArraySource, FileSource, Source
from snclr.data.splits import Subset
from snclr.durable import discard, write_atomic
from snclr.errors import UserError
from snclr.evaluate.resume import EVALUATION, short_hash

FEATURES = "features"
_INFO = "info.json"
_LARGE = 100_000_000  # bytes from which on a person is told


class Block(NamedTuple):
    """Features (n, d) of the images `ids` (n,), and the images of the block that could not be read."""

    ids: Ids
    features: Tensor
    skipped: list[Skip]


@dataclass
class FeatureStore:
    """The features of one source by one network, in a folder; what cannot be kept is computed again, never an error.

    `role` says which network of the run it is (encoder, y1, y2); `weights` is its digest.
    """

    run: Path
    role: str
    weights: str
    source: Source
    image_size: int
    device: str = "cpu"
    writable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.info = {
            "schema": 1, "role": self.role, "weights_sha256": self.weights, "fingerprint": self.source.fingerprint(),
            "images": len(self.source), "image_size": self.image_size, "view": "centre crop",
            "device": torch.device(self.device).type,
        }  # fmt: skip
        self.parent = Path(self.run) / EVALUATION / FEATURES
        self.folder = self.parent / f"{self.role}-{short_hash(self.info)}"

    def read(self, number: int, ids: Ids) -> Block | None:
        """A block, if it is there, whole, and of these images (by their numbers) as they are now."""
        path = self._path(number)
        try:
            raw = path.read_bytes()
            metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
            from safetensors.torch import load

            tensors = load(raw)
            kept, features = tensors["ids"].numpy(), tensors["features"]
            intact = metadata["sha256"] == _digest(features, kept) and len(kept) == len(features)
            if not intact or metadata["stamp"] != stamp(self.source, ids):
                return None
            return Block(kept, features, [Skip(**entry) for entry in json.loads(metadata["skipped"])])
        except Exception:  # missing, cut short, of another schema: whatever it is, it is computed again
            return None

    def write(self, number: int, ids: Ids, block: Block, say: Callable[[str], None]) -> None:
        """Keep a block; where that fails (no space, no permission), say so once and keep none from then on."""
        if not self.writable:
            return
        from safetensors.torch import save

        try:
            if not self.folder.is_dir():
                self._begin(block.features.shape[1], say)
            metadata = {
                "stamp": stamp(self.source, ids),
                "skipped": json.dumps([asdict(skip) for skip in block.skipped]),
                "sha256": _digest(block.features, block.ids),
            }
            tensors = {
                "features": block.features.contiguous(),
                "ids": torch.from_numpy(np.ascontiguousarray(block.ids)),
            }
            write_atomic(self._path(number), save(tensors, metadata))
        except (OSError, UserError) as error:
            self.writable = False
            say(f"features are not kept, so an interrupted extraction starts anew: {error}")

    def _path(self, number: int) -> Path:
        return self.folder / f"block-{number:06d}.safetensors"

    def _begin(self, width: int, say: Callable[[str], None]) -> None:
        self._drop_outdated()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / _INFO, json.dumps({**self.info, "data": self.source.name}, indent=1) + "\n")
        size = 4 * width * len(self.source)
        if size >= _LARGE:
            say(f"features are kept in {self.folder} ({size / 1e9:.1f} GB); --no-cache keeps none, and the folder may "
                "be deleted at any time")  # fmt: skip

    def _drop_outdated(self) -> None:
        """Delete features of weights that the run does not have any more: nothing can ever use them again."""
        for path in self.parent.glob(f"{self.role}-*"):
            try:
                outdated = json.loads((path / _INFO).read_bytes())["weights_sha256"] != self.weights
            except (OSError, ValueError, KeyError, TypeError):
                outdated = True
            if outdated:
                discard(path)


def stamp(source: Source, ids: Ids) -> str:
    """A digest of some images that changes when they do: of pixels in memory, of files' names, sizes and times.

    >>> images = ArraySource("a", np.zeros((2, 4, 4, 3), np.uint8))
    >>> before = stamp(images, np.array([0])); images.images[1] = 9
    >>> before == stamp(images, np.array([0])), before == stamp(images, np.array([0, 1]))
    (True, False)
    """
    if isinstance(source, Subset):
        return stamp(source.source, source.index[ids])
    digest = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
    if isinstance(source, ArraySource):
        digest.update(np.ascontiguousarray(source.images[ids]).data)
    elif isinstance(source, FileSource):
        for index in ids.tolist():
            digest.update(os.fsencode(source.files[index]) + b"\0" + _state(source.folder / source.files[index]))
    else:
        digest.update(source.fingerprint().encode())
    return digest.hexdigest()


def _state(path: Path) -> bytes:
    try:
        status = path.stat()
    except OSError as error:
        return repr(error.errno).encode()
    return f"{status.st_size} {status.st_mtime_ns}\0".encode()


def _digest(features: Tensor, ids: Ids) -> str:
    digest = hashlib.sha256(features.contiguous().numpy().data)
    digest.update(np.ascontiguousarray(ids).data)
    return digest.hexdigest()


def open_store(
    run: Path | str, role: str, state: dict[str, Any], source: Source, *, image_size: int, device: str
) -> FeatureStore:
    """The store for a network of a run, given by its state_dict."""
    from snclr.export.encoder import weights_digest

    return FeatureStore(Path(run), role, weights_digest(state), source, image_size, device)
