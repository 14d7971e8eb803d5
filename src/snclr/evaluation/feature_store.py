"""Cached features, in blocks: a stopped extraction continues, and the next evaluation reuses them.

    RUN/evaluation/features/ROLE-KEY/info.json                   what the features are of
                                     block-000012.safetensors    features, ids; metadata: skipped, sha256, and
                                                                 stamp, the digest of the images

The key is a hash of the weights, the dataset fingerprint, the view and the device type. A block is used only while its
images are unchanged: by content (arrays) or by size and mtime (files). The directory may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset
from snclr.data.loader import Skip
from snclr.data.sampler import Ids
from snclr.data.splits import Subset
from snclr.errors import UserError
from snclr.evaluation.state import EVALUATION, short_hash
from snclr.io.atomic import discard, write_atomic

FEATURES = "features"
_INFO = "info.json"


class Block(NamedTuple):
    """Ids (n,) and features (n, d) of the images of one block, and those that could not be read."""

    ids: Ids
    features: Tensor
    skipped: list[Skip]


@dataclass
class FeatureStore:
    """The cached features of one dataset by one network; a cache that fails is disabled, never an error.

    `role` names the network of the run (encoder, y1, y2 …), `weights` is its digest.
    """

    run: Path
    role: str
    weights: str
    dataset: ImageDataset
    image_size: int
    device: str = "cpu"
    precision: str = "32"
    writable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.info = {
            "schema": 1, "role": self.role, "weights_sha256": self.weights, "fingerprint": self.dataset.fingerprint(),
            "images": len(self.dataset), "image_size": self.image_size, "view": "center crop",
            "device": torch.device(self.device).type,
        }  # fmt: skip
        if self.precision != "32":
            self.info["precision"] = self.precision
        self.parent = Path(self.run) / EVALUATION / FEATURES
        self.folder = self.parent / f"{self.role}-{short_hash(self.info)}"

    def read(self, number: int, ids: Ids) -> Block | None:
        """Return a block if it is intact and its images `ids` have not changed since, else None."""
        from safetensors import safe_open

        try:
            with safe_open(self._path(number), framework="pt") as file:
                metadata, features, kept = file.metadata(), file.get_tensor("features"), file.get_tensor("ids").numpy()
            intact = metadata["sha256"] == _digest(features, kept) and len(kept) == len(features)
            if not intact or metadata["stamp"] != images_digest(self.dataset, ids):
                return None
            return Block(kept, features, [Skip(**entry) for entry in json.loads(metadata["skipped"])])
        except Exception:  # missing, truncated or of another schema: computed again
            return None

    def write(self, number: int, ids: Ids, block: Block, warn: Callable[[str], None]) -> None:
        """Write a block; the first failure (no space, no permission) is reported and disables the cache."""
        if not self.writable:
            return
        from safetensors.torch import save

        try:
            if not self.folder.is_dir():
                self._create()
            metadata = {
                "stamp": images_digest(self.dataset, ids),
                "skipped": json.dumps([asdict(skip) for skip in block.skipped]),
                "sha256": _digest(block.features, block.ids),
            }
            kept = torch.from_numpy(np.ascontiguousarray(block.ids))
            write_atomic(self._path(number), save({"features": block.features.contiguous(), "ids": kept}, metadata))
        except (OSError, UserError) as error:
            self.writable = False
            warn(f"features are not cached, so a stopped extraction starts again from the beginning: {error}")

    def _path(self, number: int) -> Path:
        return self.folder / f"block-{number:06d}.safetensors"

    def _create(self) -> None:
        self._drop_outdated()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / _INFO, json.dumps({**self.info, "data": self.dataset.name}, indent=1) + "\n")

    def _drop_outdated(self) -> None:
        """Delete features of weights that the run no longer has."""
        for path in self.parent.glob(f"{self.role}-*"):
            try:
                outdated = json.loads((path / _INFO).read_bytes())["weights_sha256"] != self.weights
            except (OSError, ValueError, KeyError, TypeError):
                outdated = True
            if outdated:
                discard(path)


def images_digest(dataset: ImageDataset, ids: Ids) -> str:
    """Return a digest that changes with the images: of pixels in memory, or of file names, sizes and mtimes.

    >>> images = ArrayDataset("a", np.zeros((2, 4, 4, 3), np.uint8))
    >>> before = images_digest(images, np.array([0])); images.images[1] = 9
    >>> before == images_digest(images, np.array([0])), before == images_digest(images, np.array([0, 1]))
    (True, False)
    """
    if isinstance(dataset, Subset):
        return images_digest(dataset.dataset, dataset.index[ids])
    digest = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
    if isinstance(dataset, ArrayDataset):
        digest.update(np.ascontiguousarray(dataset.images[ids]).data)
    elif isinstance(dataset, FileDataset):
        for name in (dataset.files[index] for index in ids.tolist()):
            try:
                status = os.stat(dataset.folder / name)
                state = f"{status.st_size} {status.st_mtime_ns}"
            except OSError as error:
                state = str(error.errno)
            digest.update(os.fsencode(name) + b"\0" + state.encode() + b"\0")
    else:
        digest.update(dataset.fingerprint().encode())
    return digest.hexdigest()


def _digest(features: Tensor, ids: Ids) -> str:
    digest = hashlib.sha256(features.contiguous().numpy().data)
    digest.update(np.ascontiguousarray(ids).data)
    return digest.hexdigest()
